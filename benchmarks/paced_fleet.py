"""A live fleet of paced workers: the real gateway, and workers that share a few processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from launcher.resolve import resolve, write_config
from launcher.service import Service, ServiceSpec, service_specs
from prfaas.config import Config
from simulations.fidelity.scaled import HEAD_DIM, LAYERS

END_TOKEN = 0
VOCABULARY = 1 + 256 + 2**15
"""The end, the bytes, and pairs of them: so many that a token seldom comes twice in an answer."""
START_S = 300.0
STOP_S = 15.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def write_model(folder: Path, context_length: int) -> Path:
    """A folder that stands for a model: its shape and a tokenizer of bytes and pairs, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [a + b for a in alphabet for b in alphabet]
    tokens = ["<end>", *alphabet, *pairs][:VOCABULARY]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HEAD_DIM,
        "intermediate_size": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "eos_token_id": END_TOKEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds of each process over a stretch of time, and of everything on this machine."""

    elapsed_s: float
    seconds: dict[str, float]
    machine_s: float

    @property
    def shares(self) -> dict[str, float]:
        """Of one core, by process."""
        return {name: used / self.elapsed_s for name, used in self.seconds.items()}

    @property
    def machine_share(self) -> float:
        """Of all cores, by whatever ran."""
        return self.machine_s / self.elapsed_s / (os.cpu_count() or 1)


class PacedFleet:
    """The fleet as an async context manager; inside, the gateway takes requests.

    Args:
        config: its ports may be 0.
        run_dir: for configuration and logs.
        processes: that the workers are spread over.
    """

    def __init__(self, config: Config, run_dir: Path, processes: int = 2) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.decisions, self.journal = run_dir / "decisions.jsonl", run_dir / "journal.jsonl"
        gateway = msgspec.structs.replace(
            config.gateway, decision_log=str(self.decisions), journal=str(self.journal)
        )
        self.config = resolve(msgspec.structs.replace(config, gateway=gateway))
        self._path = write_config(self.config, run_dir)
        specs, gateway_spec = service_specs(self.config, self._path, run_dir)
        self.url = gateway_spec.url
        self.worker_urls = {spec.name: spec.url for spec in specs}
        self._services = [
            Service(self._group(index, specs[index::processes], run_dir))
            for index in range(min(processes, len(specs)))
        ]
        self._gateway = Service(gateway_spec)
        self._began: dict[str, float] = {}
        self._began_s = 0.0
        self._began_machine_s = 0.0

    def _group(self, index: int, specs: list[ServiceSpec], run_dir: Path) -> ServiceSpec:
        names = [argument for spec in specs for argument in ("--name", spec.name)]
        command = (sys.executable, "-P", "-m", "prfaas.worker.many", "--config", str(self._path), *names)
        name = f"workers-{index}"
        return ServiceSpec(name, command, specs[0].url, run_dir / f"{name}.log")

    async def __aenter__(self) -> PacedFleet:
        try:
            for service in (*self._services, self._gateway):
                await service.spawn()
            async with aiohttp.ClientSession() as http:
                for service in (*self._services, self._gateway):
                    await service.wait_ready(http, START_S)
                await self._wait_for_workers(http)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        await self._gateway.stop(STOP_S)
        await asyncio.gather(*(service.stop(STOP_S) for service in self._services))

    async def _wait_for_workers(self, http: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(START_S):
            while True:
                async with http.get(f"{self.url}/readyz") as answer:
                    body = await answer.json()
                ready = sum(len(names) for names in body["workers"].values())
                if answer.status == 200 and ready == len(self.worker_urls):
                    return
                await asyncio.sleep(0.2)

    def measure_cpu(self) -> None:
        """Start counting CPU time."""
        self._began, self._began_s, self._began_machine_s = self._cpu_s(), time.monotonic(), _machine_s()

    def cpu_use(self) -> CpuUse:
        """CPU time since `measure_cpu`."""
        now = self._cpu_s()
        return CpuUse(
            time.monotonic() - self._began_s,
            {name: now[name] - self._began.get(name, 0.0) for name in now},
            _machine_s() - self._began_machine_s,
        )

    def _cpu_s(self) -> dict[str, float]:
        used = {"client": time.process_time()}
        for service in (*self._services, self._gateway):
            with suppress(OSError):  # it has just died: whoever waits for its answers will say so
                fields = Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()
                used[service.name] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        return used


def _machine_s() -> float:
    """CPU seconds of all processes since the machine started, idle and waiting for disks left out."""
    user, nice, system, _idle, _iowait, *others = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    return sum(int(ticks) for ticks in (user, nice, system, *others)) / _TICKS_PER_S
