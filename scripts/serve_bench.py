"""This server and mlx_lm.server side by side: the same weights, prompts, numbers of tokens.

    python scripts/serve_bench.py                         # 1, 4 and 16 clients, about 4 minutes
    python scripts/serve_bench.py --quick                 # a minute, to see whether all works
    python scripts/serve_bench.py --shared-prefix         # the time that a known prefix saves
    python scripts/serve_bench.py --theirs-url http://127.0.0.1:8080 --ours-url http://127.0.0.1:8000

Both servers run as children and stay loaded; they take turns, and only one has requests at a time.
Each of the clients streams a chat, greedily, and sends its next one when the last has ended. No
prompt comes twice. On a CPU both serve a float32 copy of the weights, written to a temporary
folder. `ratio` is ours over theirs for throughput, theirs over ours for times: more is better.
Times include the client's own work, which is the same for both. Memory is that of a server's
processes together, pages that they share counted for each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurements import report
from serving.client import Reply
from serving.comparison import Side, compare, plot, print_report
from serving.load import Job, Target, percentile, run_jobs, run_phase
from serving.processes import MemoryMeter, ServerProcess
from serving.prompts import chat_prompts, system_prompt

LOADING_SECONDS = 300.0
SYSTEM_PROMPT_TOKENS = 1500
MAX_PREFIX_SHARE = 0.1

# Requests that each client sends in a round; 2 in other loads.
REQUESTS_PER_CLIENT = {1: 4}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a hub id")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="clients"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of each load, taking turns")
    parser.add_argument("--requests", type=int, metavar="N", help="of each client in a round")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer at most")
    parser.add_argument("--kv-memory", default="1", metavar="GIB", help="of our pool")
    parser.add_argument("--quick", action="store_true", help="one round, answers of 16 tokens")
    parser.add_argument(
        "--shared-prefix", action="store_true", help="measure the first token's time instead"
    )
    parser.add_argument("--ours-url", metavar="URL", help="a server that runs, without /v1")
    parser.add_argument("--theirs-url", metavar="URL", help="a server that runs, without /v1")
    parser.add_argument("--api-key", metavar="KEY", help="of servers that run")
    parser.add_argument("--skip-theirs", action="store_true", help="our side only")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="of a request")
    report.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.tokens, args.requests = 1, 16, args.requests or 1
    if min(args.concurrency) < 1 or args.rounds < 1 or args.tokens < 1:
        parser.error("--concurrency, --rounds and --tokens must be at least 1")
    return args


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[list[Side]]:
    """Ours, then theirs; started here unless their address is given."""
    with contextlib.ExitStack() as stack:
        started: list[tuple[str, ServerProcess]] = []
        urls = {"mlx-paged": args.ours_url, "mlx-lm": args.theirs_url}
        names = ["mlx-paged"] if args.skip_theirs else list(urls)
        if any(urls[name] is None for name in names):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-bench-"))
            path = str(checkpoint(args.model, Path(folder)))
            for name in names:
                if urls[name] is None:
                    server = ServerProcess(name, *command(name, path, args))
                    started.append((name, stack.enter_context(server)))
        sides = {name: Side(name, target_of(urls[name], args)) for name in names if urls[name]}
        for name, server in started:
            server.wait_ready(LOADING_SECONDS)
            model = "default_model" if name == "mlx-lm" else model_of(server.url, None)
            meter = stack.enter_context(MemoryMeter(server.pid))
            sides[name] = Side(name, Target(server.url, model), meter)
        yield [sides[name] for name in names]


def checkpoint(model: str, folder: Path) -> Path:
    from serving.checkpoint import servable

    return servable(model, folder)


def command(name: str, path: str, args: argparse.Namespace) -> tuple[list[str], str]:
    """A server's command, and the path that tells whether it can be asked."""
    if name == "mlx-lm":
        options = ["server", "--model", path, "--port", "{port}", "--log-level", "WARNING"]
        return [sys.executable, "-m", "mlx_lm", *options], "/health"
    options = ["serve", "--model", path, "--port", "{port}", "--kv-memory", args.kv_memory]
    return [sys.executable, "-m", "mlx_paged", *options, "--log-level", "warning"], "/ready"


def target_of(url: str, args: argparse.Namespace) -> Target:
    url = url.rstrip("/").removesuffix("/v1")
    return Target(url, model_of(url, args.api_key), args.api_key)


def model_of(url: str, key: str | None) -> str:
    """The first model that a server names."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{url}/v1/models names no model: {error}") from error


def chat(num_tokens: int, *messages: str) -> Job:
    """The last message is the user's; one before it is the system's."""
    roles = ("system", "user")[-len(messages) :]
    return Job(
        {
            "messages": [
                {"role": role, "content": content}
                for role, content in zip(roles, messages, strict=True)
            ],
            "temperature": 0,
            "max_tokens": num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def num_requests(concurrency: int, args: argparse.Namespace) -> int:
    each = args.requests or REQUESTS_PER_CLIENT.get(concurrency, 2)
    return int(concurrency * each)


def warm_up(sides: list[Side], args: argparse.Namespace) -> None:
    """A short and a long prompt, and as many at once as there will be."""
    jobs = [chat(4, "Hello"), chat(4, f"Repeat this. {system_prompt(-1, 500)}")]
    jobs += [chat(4, f"Count to {i}.") for i in range(max(args.concurrency))]
    for side in sides:
        for reply in run_phase(side.target, jobs, max(args.concurrency), args.timeout).replies:
            if reply.error is not None:
                raise RuntimeError(f"{side.name} can't answer: {reply.error}")


def run_loads(sides: list[Side], args: argparse.Namespace) -> None:
    """Fills in the phases of both sides; who goes first changes from round to round."""
    loads = [num_requests(concurrency, args) for concurrency in args.concurrency]
    texts = iter(chat_prompts(args.rounds * sum(loads)))
    with report.progress() as bar:
        task = bar.add_task("loads", total=args.rounds * len(loads) * len(sides))
        for number in range(args.rounds):
            for concurrency, count in zip(args.concurrency, loads, strict=True):
                jobs = [chat(args.tokens, next(texts)) for _ in range(count)]
                for side in sides[:: 1 if number % 2 == 0 else -1]:
                    what = f"{side.name}, {concurrency} at once, round {number + 1}"
                    bar.update(task, description=what)
                    phase = run_phase(side.target, jobs, concurrency, args.timeout)
                    side.phases.setdefault(concurrency, []).append(phase)
                    bar.advance(task)


def measure_prefix(sides: list[Side], args: argparse.Namespace) -> dict[str, Any]:
    """First tokens' times of two requests in turn that share a system prompt, several times."""
    found: dict[str, Any] = {"model": args.model, "sides": {}}
    for side in sides:
        pairs = []
        for number in range(2 if args.quick else 5):
            system = system_prompt(number, SYSTEM_PROMPT_TOKENS)
            jobs = [chat(2, system, "Is it hot?"), chat(2, system, "Who came first, and why?")]
            pairs.append(asyncio.run(run_jobs(side.target, jobs, 1, args.timeout)))
        found["sides"][side.name] = prefix_times(side.name, pairs)
    return found


def prefix_times(name: str, pairs: list[list[Reply]]) -> dict[str, Any]:
    for reply in (reply for pair in pairs for reply in pair):
        if reply.error is not None or reply.first_seconds is None:
            raise RuntimeError(f"{name} gave no text: {reply.error}")
    times = [[reply.first_seconds or 0.0 for reply in pair] for pair in pairs]
    return {
        "num_prompt_tokens": [pair[1].num_prompt_tokens for pair in pairs],
        "num_cached_tokens": [pair[1].num_cached_tokens for pair in pairs],
        "first_s": [first for first, _ in times],
        "second_s": [second for _, second in times],
        "share": statistics.median(second / first for first, second in times),
    }


def print_prefix(result: dict[str, Any]) -> None:
    rows = [
        [
            name,
            min(side["num_prompt_tokens"]),
            min(count or 0 for count in side["num_cached_tokens"]),
            f"{percentile(side['first_s'], 50) * 1000:,.0f}",
            f"{percentile(side['second_s'], 50) * 1000:,.0f}",
            f"{side['share']:.3f}",
        ]
        for name, side in result["sides"].items()
    ]
    columns = ["", "prompt tokens", "cached", "first ms", "second ms", "second over first"]
    title = "first token's time of two requests that share a system prompt"
    report.show(report.make_table(title, columns, rows))


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with servers(args) as sides:
        names = [side.name for side in sides]
        warm_up(sides, args)
        if args.shared_prefix:
            result = measure_prefix(sides, args)
            report.print_json(result) if args.json else print_prefix(result)
            return int(result["sides"][names[0]]["share"] > MAX_PREFIX_SHARE)
        run_loads(sides, args)
        result = {
            "model": args.model,
            "num_tokens": args.tokens,
            "rounds": args.rounds,
            "loads": compare(sides),
            "peak_memory_bytes": {
                side.name: side.meter.peak_nbytes for side in sides if side.meter
            },
        }
    report.print_json(result) if args.json else print_report(result, names)
    if args.plot:
        plot(result, names, args.plot)
    return int(any(load[name]["num_errors"] for load in result["loads"] for name in names))


if __name__ == "__main__":
    report.run(main)
