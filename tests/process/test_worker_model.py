"""The real small model: equal greedy answers wherever the prompt was prefilled (float32)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet import fleet_tree, running_fleet

from prfaas.engine.tokenizer import Tokenizer

pytestmark = [pytest.mark.process, pytest.mark.model, pytest.mark.timeout(300)]
TEXTS = (
    "The capital of France is",
    "A prefill worker computes the keys and values of a prompt; a decode worker " * 30,
)


async def test_the_real_model_answers_alike_with_remote_and_with_local_prefill(
    real_model_path: Path, tmp_path: Path
) -> None:
    tree = fleet_tree(real_model_path, tmp_path / "state")
    for cluster in tree["clusters"].values():
        for worker in cluster["workers"].values():
            worker.update(page_size=32, memory="128MiB", chunk_tokens=128, checksum_pages=True)
    tokenizer = Tokenizer(real_model_path)
    async with running_fleet(tree, tmp_path, "decode-0", "remote-0") as fleet:
        for text in TEXTS:
            token_ids = tokenizer.encode(text, add_special_tokens=True)
            remote = await fleet.generate(
                "decode-0", fleet.request(token_ids, site="remote-0", max_tokens=16)
            )
            local = await fleet.generate("decode-0", fleet.request(token_ids, cache_salt="l", max_tokens=16))
            assert remote.token_ids == local.token_ids, remote.frames
            assert remote.text == local.text
            assert remote.report.site == "remote-0"
        assert (
            "Paris"
            in (
                await fleet.generate(
                    "decode-0",
                    fleet.request(tokenizer.encode(TEXTS[0], add_special_tokens=True), max_tokens=16),
                )
            ).text
        )
        await fleet.settled("decode-0", "remote-0")
