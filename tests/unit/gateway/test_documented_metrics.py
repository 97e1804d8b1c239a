"""docs/metrics.md names every metric family that the services expose, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from policies.cost_model import CostModel
from prfaas.engine.interface import EngineLoad
from prfaas.protocol.messages import WorkerStatus
from prfaas.worker.metrics import WorkerMetrics
from router.admission import Admission
from router.core.scheduler import Scheduler
from router.core_metrics import SchedulerCollector
from router.metrics import GatewayMetrics

PAGE = Path(__file__).parents[3] / "docs/metrics.md"


def gateway_registry() -> CollectorRegistry:
    metrics = GatewayMetrics()
    metrics.add_collector(SchedulerCollector(Scheduler(CostModel()), Admission(1, metrics)))
    return metrics.registry


def worker_registry() -> CollectorRegistry:
    status = WorkerStatus(worker="w", incarnation="1", role="decode", state="ready")
    load = EngineLoad(
        waiting=0, running=0, waiting_prefill_tokens=0, running_context_tokens=0,
        prefill_tokens_total=0, decode_tokens_total=0, steps_total=0, busy_s_total=0.0,
    )  # fmt: skip
    return WorkerMetrics(lambda: status, lambda: load).registry


@pytest.mark.parametrize(
    ("title", "registry"), [("Gateway", gateway_registry()), ("Worker", worker_registry())]
)
def test_the_page_has_every_family_with_its_type(title: str, registry: CollectorRegistry) -> None:
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    documented = {
        (name, kind)
        for names, kind in re.findall(r"^\| (`[^|]*`) \| (\w+) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    exposed = {
        (f"{family.name}_total" if family.type == "counter" else family.name, family.type)
        for family in registry.collect()
    }
    assert documented == exposed
