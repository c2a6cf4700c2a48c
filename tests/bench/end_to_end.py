"""From the start of the processes to tokens: swarms of 1 and of 3 peers beside transformers' own
``generate``.

    python tests/bench/end_to_end.py [--tokens 128] [--rounds 3] [--json]

Speeds on a shared machine drift, so compare the ratios: every round measures all of them, and medians are
printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.client import answer, swarm_of, until_ready
from support.processes import api_of, swarm

PROMPT = "Why is the sky blue?"
DEALT = {1: ["0:30"], 3: ["0:13", "13:26", "26:30"]}
"""As the demo deals them on equal peers: the LM head weighs as much as eight layers."""


def measure_swarm(peers: int, dtype: str, tokens: int) -> dict[str, Any]:
    """Start a swarm, answer once to warm up and once to measure."""
    threads = str(max(1, (os.cpu_count() or 1) // peers))
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with swarm(Path(folder)) as made:
            processes = made.start(*DEALT[peers], dtype=dtype, more=["--threads", threads])
            url = api_of(processes[0])

            async def run() -> dict[str, Any]:
                await until_ready(url)
                _, first = await answer(url, PROMPT, temperature=0, max_tokens=8)
                start_s = time.monotonic() - began - 7 / max(first.tokens_per_s, 0.1)
                _, figures = await answer(url, PROMPT, temperature=0, max_tokens=tokens)
                view = await swarm_of(url)
                return {
                    "start_to_first_token_s": start_s,
                    "ttft_s": figures.ttft_s,
                    "tok_s": figures.tokens_per_s,
                    "rss_mib": [round(peer["memory_used"] / 2**20) for peer in view["peers"]],
                }

            return asyncio.run(run())


class Generate:
    """transformers' ``generate`` with all cores."""

    def __init__(self, dtype: str) -> None:
        import torch
        from support.reference import Reference

        torch.set_num_threads(os.cpu_count() or 1)
        self._torch = torch
        self._reference = Reference()
        self._model = self._reference.model.to(getattr(torch, dtype))
        self.measure(8)

    def measure(self, tokens: int) -> float:
        """Tokens per second after the first, of one greedy answer."""
        ids = self._torch.tensor([self._reference.prompt(PROMPT)])

        def run(count: int) -> float:
            began = time.monotonic()
            self._model.generate(ids, do_sample=False, min_new_tokens=count, max_new_tokens=count)
            return time.monotonic() - began

        first = run(1)
        return (tokens - 1) / (run(tokens) - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for dtype in ("float32", "bfloat16"):
        generate = Generate(dtype)
        rounds: dict[str, list[Any]] = {"generate": [], "1": [], "3": []}
        for _ in range(options.rounds):
            rounds["generate"].append(generate.measure(options.tokens))
            for peers in DEALT:
                rounds[str(peers)].append(measure_swarm(peers, dtype, options.tokens))
        base = median(rounds["generate"])
        row: dict[str, Any] = {"dtype": dtype, "generate_tok_s": round(base, 2)}
        for peers in DEALT:
            runs = rounds[str(peers)]
            speed = median(run["tok_s"] for run in runs)
            row[f"peers_{peers}"] = {
                "tok_s": round(speed, 2),
                "of_generate": round(speed / base, 3),
                "ttft_s": round(median(run["ttft_s"] for run in runs), 3),
                "start_to_first_token_s": round(median(run["start_to_first_token_s"] for run in runs), 2),
                "rss_mib": runs[-1]["rss_mib"],
            }
        rows.append(row)
        if not options.json:
            print(json.dumps(row, indent=2))
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
