from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.config import (
    AuthConfig,
    ClusterConfig,
    Config,
    GatewayConfig,
    LinkConfig,
    ModelConfig,
    PolicyConfig,
    TimeoutsConfig,
    WorkerConfig,
)
from prfaas.config_check import check_standalone
from prfaas.config_load import dump, load, loads, twins
from prfaas.errors import ConfigError
from prfaas.units import Bytes, Rate, Seconds

ROOT = Path(__file__).resolve().parents[3]

BASE: dict[str, Any] = {
    "model": {"path": "some-model"},
    "clusters": {
        "pd": {
            "kind": "pd",
            "workers": {"decode-0": {"role": "decode", "port": 8101}, "prefill-0": {"role": "prefill"}},
        },
        "far-east": {"kind": "prefill", "workers": {"remote-0": {"role": "prefill", "memory": "2GiB"}}},
    },
    "links": {"wan": {"between": ["pd", "far-east"], "capacity": "200Mbit", "rtt": "40ms", "emulate": True}},
}


def tree_with(path: str, value: Any) -> dict[str, Any]:
    """A copy of BASE with one field set, given as `a.b.c`."""
    tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(BASE))
    *parents, last = path.split(".")
    at = tree
    for part in parents:
        at = at.setdefault(part, {})
    at[last] = value
    return tree


def load_tree(tree: dict[str, Any], **environment: str) -> Config:
    return loads(yaml.safe_dump(tree), environment)


def error_of(tree: dict[str, Any], **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tree(tree, **environment)
    return str(caught.value)


def test_quantities_and_defaults_are_parsed_into_base_units() -> None:
    config = load_tree(BASE)
    assert config.links["wan"].capacity == 25e6
    assert config.links["wan"].rtt == pytest.approx(0.04)
    assert config.worker("remote-0")[1].memory == 2 * 2**30
    assert config.gateway_cluster == "pd"
    assert config.link_between("far-east", "pd") == ("wan", config.links["wan"])


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("clusters.pd.workers.decode-0.thread", 2, ("clusters.pd.workers.decode-0.thread", "`threads`")),
        ("polcy", {}, ("polcy", "`policy`")),
        ("timeouts.hearbeat", 1, ("timeouts.hearbeat", "`heartbeat`")),
        ("links.wan.bandwidth", "1Gbit", ("links.wan.bandwidth", "capacity")),
    ],
)
def test_an_unknown_field_is_refused_with_its_path_and_the_nearest_name(
    path: str, value: Any, said: tuple[str, str]
) -> None:
    message = error_of(tree_with(path, value))
    assert "unknown field" in message
    assert all(part in message for part in said)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("clusters.pd.workers.decode-0.threads", "two"),
        ("clusters.pd.workers.decode-0.threads", True),
        ("clusters.pd.workers.decode-0.role", "verify"),
        ("clusters.pd.workers.decode-0.cpus", [0, "one"]),
        ("clusters.pd.workers.decode-0.memory", "1 gigabyte"),
        ("clusters.pd.workers", ["decode-0"]),
        ("links.wan.capacity", 200),
        ("links.wan.rtt", "40 furlongs"),
        ("gateway", 8000),
        ("gateway.calibrate", "yes please"),
    ],
)
def test_a_wrong_type_is_refused_with_its_path(path: str, value: Any) -> None:
    assert f"`{path}`" in error_of(tree_with(path, value))


def test_a_missing_field_is_named() -> None:
    assert "`model.path` is missing" in error_of(tree_with("model", {}))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("clusters.far-east.workers.remote-0.role", "decode", "belong into a pd cluster"),
        ("clusters.pd.kind", "prefill", "no cluster of kind pd"),
        ("clusters.far-east.workers.decode-0", {"role": "prefill"}, "names must be unique"),
        ("clusters.far-east.workers.remote-0.page_size", 64, "all must match"),
        ("clusters.far-east.workers.remote-0.dtype", "bfloat16", "all must match"),
        ("clusters.far-east.workers", {}, "is empty"),
        ("clusters.third", {"kind": "prefill", "workers": {"x": {"role": "prefill"}}}, "no link joins"),
        ("links.wan.between", ["pd", "mars"], "which is no cluster"),
        ("links.wan.between", ["pd", "pd"], "to itself"),
        ("links.second", {"between": ["far-east", "pd"], "capacity": "1Gbit", "rtt": 0}, "keep one"),
        ("links.wan.capacity", "0Mbit", "above 0"),
        ("links.wan.rtt", -1, "0 or more"),
        ("links.wan.rtt", float("nan"), "0 or more"),
        ("gateway.seed", -1, "0 or more"),
        ("policy.time_budget", 0, "above 0"),
        ("auth.client_tokens", ["secret", ""], "empty token"),
        ("gateway.cluster", "far-east", "not of kind pd"),
        ("gateway.port", 8101, "is also the port of `gateway`"),
        ("gateway.port", 70000, "between 0 and 65535"),
        ("timeouts.silence", "300ms", "at least twice"),
        ("timeouts.drain", 0, "above 0"),
        ("timeouts.lease", float("nan"), "above 0"),
        ("timeouts.request", "25h", "at most 24 hours"),
        ("clusters.pd.workers.decode-0.chunk_tokens", 0, "at least 1"),
        ("clusters.pd.workers.decode-0.cpus", [1, 1], "distinct core numbers"),
    ],
)
def test_a_contradiction_is_refused_in_one_sentence(path: str, value: Any, said: str) -> None:
    message = error_of(tree_with(path, value))
    assert said in message
    assert "\n" not in message


def test_count_writes_workers_out_with_consecutive_ports() -> None:
    config = load_tree(
        tree_with("clusters.far-east.workers", {"r": {"role": "prefill", "count": 3, "port": 9000}})
    )
    workers = config.clusters["far-east"].workers
    assert {name: worker.port for name, worker in workers.items()} == {"r-0": 9000, "r-1": 9001, "r-2": 9002}
    assert all(worker.count == 1 for worker in workers.values())


def test_count_with_pinned_cores_is_refused() -> None:
    tree = tree_with("clusters.far-east.workers.remote-0", {"role": "prefill", "count": 2, "cpus": [0]})
    assert "list them one by one" in error_of(tree)


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        loads("model: {path: a, path: b}\nclusters: {}\n", {})


def test_broken_yaml_is_told_by_line_and_column() -> None:
    with pytest.raises(ConfigError, match=r"^f\.yaml is not valid YAML: line 2, column 10: mapping values"):
        loads("model:\n  path: a: b\n", {}, source="f.yaml")


def test_a_refused_value_is_shown_once() -> None:
    assert error_of(tree_with("links.wan.capacity", 200)).count("200`") == 1
    assert "('two')" in error_of(tree_with("clusters.pd.workers.prefill-0.threads", "two"))


def test_yaml_that_could_build_objects_is_refused() -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        loads("model: !!python/object/apply:os.getcwd []\n", {})


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("PRFAAS_CLUSTERS__PD__WORKERS__DECODE_0__THREADS", "3", "clusters.pd.workers.decode-0.threads", 3),
        (
            "PRFAAS_CLUSTERS__FAR_EAST__WORKERS__REMOTE_0__CPUS",
            "[0, 1]",
            "clusters.far-east.workers.remote-0.cpus",
            [0, 1],
        ),
        ("PRFAAS_LINKS__WAN__CAPACITY", "20Mbit", "links.wan.capacity", "20Mbit"),
        ("PRFAAS_LINKS__WAN__EMULATE", "false", "links.wan.emulate", False),
        ("PRFAAS_TIMEOUTS__LEASE", "5s", "timeouts.lease", 5),
        ("PRFAAS_POLICY__NAME", "threshold", "policy.name", "threshold"),
        ("PRFAAS_POLICY__PARAMETERS", "{tokens: 100}", "policy.parameters", {"tokens": 100}),
        ("PRFAAS_AUTH__SERVICE_TOKEN", "123", "auth.service_token", "123"),
        ("PRFAAS_MODEL__NAME", "true", "model.name", "true"),
        ("PRFAAS_STATE_DIR", "elsewhere", "state_dir", "elsewhere"),
    ],
)
def test_an_environment_twin_equals_the_field_in_the_file(
    name: str, text: str, path: str, value: Any
) -> None:
    assert load_tree(BASE, **{name: text}) == load_tree(tree_with(path, value))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("PRFAAS_POLICY__NAM", "PRFAAS_POLICY__NAME"),
        ("PRFAAS_POLICY_NAME", "PRFAAS_POLICY__NAME"),
        ("PRFAAS_CLUSTERS__PD__WORKERS__DECODE_1__THREADS", "DECODE_0__THREADS"),
    ],
)
def test_a_variable_that_looks_like_a_path_and_is_none_is_refused_with_the_nearest(
    name: str, said: str
) -> None:
    message = error_of(BASE, **{name: "1"})
    assert name in message
    assert said in message


def test_flag_variables_and_foreign_variables_are_left_alone() -> None:
    assert load_tree(BASE, PRFAAS_CONFIG="x.yaml", HOME="/", PRFAAS_CACHE="y") == load_tree(BASE)


def test_standalone_services_need_fixed_ports() -> None:
    with pytest.raises(ConfigError, match="fixed ports"):
        check_standalone(load_tree(BASE))


def test_a_service_on_the_network_needs_a_service_token() -> None:
    config = loads((ROOT / "deploy/two-sites.yaml").read_text(), {})
    open_config = msgspec.structs.replace(config, auth=AuthConfig())
    with pytest.raises(ConfigError, match=r"auth\.service_token"):
        check_standalone(open_config)


@pytest.mark.parametrize("name", ["cluster.yaml", "two-sites.yaml"])
def test_the_example_configurations_load(name: str) -> None:
    config = load(ROOT / "deploy" / name, {})
    assert loads(dump(config), {}) == config


# ---------------------------------------------------------------- documentation


def test_the_documentation_has_a_row_for_every_field() -> None:
    documented = set(
        re.findall(r"^\| `([a-z_.<>]+)` \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    )
    tree = {"clusters": {"<cluster>": {"workers": {"<worker>": {}}}}, "links": {"<link>": {}}}
    assert documented == {".".join(path) for path, _ in twins(tree).values()}


def test_the_deadline_table_has_a_row_for_every_timeout() -> None:
    documented = set(
        re.findall(r"^\| `timeouts\.([a-z_]+)` \|", (ROOT / "docs/deadlines.md").read_text(), re.MULTILINE)
    )
    assert documented == set(TimeoutsConfig.__struct_fields__)


# ---------------------------------------------------------------- round trip

positive = st.integers(1, 10_000)
seconds = st.floats(0.6, 86_400).map(Seconds)
text = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f\x85\xa0"), max_size=12
)


def workers(role: str) -> st.SearchStrategy[WorkerConfig]:
    return st.builds(
        WorkerConfig,
        role=st.just(role),
        host=text,
        cpus=st.lists(st.integers(0, 63), unique=True, max_size=4),
        threads=positive,
        memory=st.integers(1, 2**50).map(Bytes),
        chunk_tokens=positive,
        checksum_pages=st.booleans(),
    )


def cluster(kind: str, worker: str, role: str) -> st.SearchStrategy[ClusterConfig]:
    return st.builds(
        ClusterConfig, kind=st.just(kind), workers=st.fixed_dictionaries({worker: workers(role)})
    )


configs = st.builds(
    Config,
    model=st.builds(ModelConfig, path=text, name=text),
    clusters=st.fixed_dictionaries(
        {"a": cluster("pd", "d", "decode"), "b": cluster("prefill", "p", "prefill")}
    ),
    links=st.fixed_dictionaries(
        {
            "ab": st.builds(
                LinkConfig,
                between=st.just(("a", "b")),
                capacity=st.floats(1e-3, 1e15).map(Rate),
                rtt=st.floats(0, 100).map(Seconds),
                emulate=st.booleans(),
            )
        }
    ),
    policy=st.builds(
        PolicyConfig, name=text, parameters=st.dictionaries(text, st.integers() | text, max_size=3)
    ),
    gateway=st.builds(
        GatewayConfig, port=st.integers(0, 65535), seed=st.integers(0, 2**31), decision_log=text
    ),
    timeouts=st.builds(TimeoutsConfig, request=seconds, lease=seconds, drain=seconds),
    auth=st.builds(AuthConfig, client_tokens=st.lists(text.filter(bool), max_size=2), service_token=text),
)


@settings(deadline=None, max_examples=80)
@given(configs)
def test_loading_what_was_dumped_gives_the_same_configuration(config: Config) -> None:
    assert loads(dump(config), {}) == config
