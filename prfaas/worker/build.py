"""Puts a worker together from the configuration: model, layout, engine, host."""

from __future__ import annotations

from pathlib import Path

from prfaas.config import Config, WorkerConfig
from prfaas.engine.fingerprint import compat_record
from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.native import NativeEngine
from prfaas.engine.paced import PacedEngine, paced_compat, scaled_profile
from prfaas.errors import ConfigError
from prfaas.kv.layout import CompatRecord, KVLayout
from prfaas.worker.host import WorkerHost


def build_host(config: Config, name: str) -> WorkerHost:
    """The host of worker `name` with an engine that is not started yet. Call it on the event loop.

    Raises:
        ConfigError: the model cannot be used, or its KV does not fit the worker's memory.
    """
    _, spec = config.worker(name)
    path = Path(config.model.path)
    model = LlamaConfig.load(path)
    try:
        layout = KVLayout.fit(model.cache_groups, spec.page_size, spec.dtype, spec.memory)
    except ValueError as error:
        raise ConfigError(f"`memory` of worker {name}: {error}") from error
    Path(config.state_dir).mkdir(parents=True, exist_ok=True)
    engine, compat = _engine(config, name, spec, path, layout)
    host = WorkerHost(config, name, engine, engine.buffer, model, compat)
    engine.on_failure = host.engine_failed
    return host


def _engine(
    config: Config, name: str, spec: WorkerConfig, path: Path, layout: KVLayout
) -> tuple[NativeEngine, CompatRecord]:
    if spec.engine == "paced":
        profile = scaled_profile(spec.paced, spec.chunk_tokens)
        return PacedEngine(path, layout, profile, max_running=spec.max_running), paced_compat(path, layout)
    engine = NativeEngine(
        path,
        layout,
        device=spec.device,
        dtype=spec.dtype,
        threads=spec.threads,
        cpus=spec.cpus,
        cpu_share=spec.cpu_share,
        chunk_tokens=spec.chunk_tokens,
        max_running=spec.max_running,
        log_path=Path(config.state_dir) / f"{name}-runner.log",
        start_deadline_s=config.timeouts.start,
    )
    return engine, compat_record(path, layout)
