"""Puts a worker together from the configuration: model, layout, engine, host."""

from __future__ import annotations

from pathlib import Path

from prfaas.config import Config
from prfaas.engine.fingerprint import compat_record
from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.native import NativeEngine
from prfaas.errors import ConfigError
from prfaas.kv.layout import KVLayout
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
    state_dir = Path(config.state_dir)
    state_dir.mkdir(parents=True, exist_ok=True)
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
        log_path=state_dir / f"{name}-runner.log",
        start_deadline_s=config.timeouts.start,
    )
    host = WorkerHost(config, name, engine, engine.buffer, model, compat_record(path, layout))
    engine.on_failure = host.engine_failed
    return host
