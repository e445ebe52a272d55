"""The options of `mlx-paged`, with the range of every value."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

from mlx_paged.cli.manners import USAGE
from mlx_paged.weights import DTYPES

MAX_BLOCK_SIZE = 256
MAX_SEED = 2**64 - 1
KV_BITS = (8, 4)
KV_GROUP_SIZES = (32, 64)

API_KEY_VARIABLE = "MLX_PAGED_API_KEY"
INSTALL_SERVER = "pip install 'mlx-paged[server]'"

MODEL_HELP = "smollm2, smollm2-qwen2, a folder written by mlx_lm.convert, or a hub id"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-paged",
        description="Generate text with MLX through a paged KV cache.",
        epilog="'mlx-paged COMMAND --help' lists a command's options.",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_generate(commands)
    _add_serve(commands)
    _add_chat(commands)
    _add_doctor(commands)
    return parser


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence instead of printing every option."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see '{self.prog} --help')\n")


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"mlx-paged {version('mlx-paged')}")
        parser.exit(0)


def whole(low: int, high: float = math.inf) -> Callable[[str], int]:
    """A parser of integers from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            span = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {span}")
        return value

    return parse


def number(low: float, high: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """A parser of finite numbers from `low` to `high`; `above` leaves out `low` itself."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or not math.isfinite(value) or (above and value == low):
            start = f"above {low:g}" if above else f"of at least {low:g}"
            end = "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {start}{end}")
        return value

    return parse


def pool_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the options of `_add_pool` say, by the names of `EngineOptions`."""
    return {
        "block_size": args.block_size,
        "num_blocks": args.num_blocks,
        "kv_memory": None if args.kv_memory is None else round(args.kv_memory * 2**30),
        "kv_bits": args.kv_bits,
        "kv_group_size": args.kv_group_size,
        "attention": args.attention,
    }


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="write an answer to a prompt",
        description="Writes an answer to a prompt; only the text goes to stdout.",
    )
    parser.add_argument("prompt", nargs="?", help="the prompt, or - to read it from stdin")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='several prompts, answered in one batch: one a line, or JSON lines with "prompt"; '
        "- is stdin",
    )
    parser.add_argument(
        "-n", type=whole(1), default=1, metavar="N", help="answers to each prompt (1)"
    )
    parser.add_argument("--raw", action="store_true", help="don't apply the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message for the chat template")
    parser.add_argument("--stats", action="store_true", help="speed, blocks and memory, on stderr")
    parser.add_argument("--json", action="store_true", help="JSON: an object, or a line per answer")
    add_sampling(parser)
    _add_model(parser)
    _add_pool(parser)


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve OpenAI's API over HTTP",
        description="Serves a model over HTTP with OpenAI's API, and a page that shows its pool "
        "of blocks. SIGTERM or Ctrl-C ends it once the open requests are done.",
    )
    _add_http(parser)
    _add_model(parser)
    _add_pool(parser)
    _add_scheduling(parser)


def _add_http(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)"
    )
    group.add_argument(
        "--port", type=whole(0, 65535), default=8000, help="port; 0 takes a free one (8000)"
    )
    group.add_argument(
        "--api-key", metavar="KEY", help=f"what clients must send (${API_KEY_VARIABLE}; none)"
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API (as --model)"
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin call the server; may be repeated (none)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which the server may be called; may be repeated (on 127.0.0.1 that and "
        "localhost, elsewhere any)",
    )
    group.add_argument(
        "--max-waiting",
        type=whole(1),
        default=1024,
        metavar="N",
        help="requests that may wait for their first token; more get status 503 (1024)",
    )
    group.add_argument(
        "--max-body",
        type=number(0, above=True),
        default=4.0,
        metavar="MIB",
        help="longest request body in MiB (4)",
    )
    group.add_argument(
        "--request-timeout",
        type=number(0),
        default=600.0,
        metavar="S",
        help="seconds until an answer must be complete; 0 for no bound (600)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=number(0, 3600),
        default=30.0,
        metavar="S",
        help="seconds that open requests have to end after SIGTERM (30)",
    )
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(info)"
    )
    group.add_argument("--no-access-log", action="store_true", help="don't log each request")


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--prefix-caching",
        choices=("hash", "radix", "off"),
        default="hash",
        help="how requests that begin alike find each other's blocks (hash)",
    )
    group.add_argument(
        "--policy",
        choices=("fcfs", "priority", "longest-prefix"),
        default="fcfs",
        help="who is admitted first (fcfs)",
    )
    group.add_argument(
        "--preemption",
        choices=("recompute", "swap"),
        default="recompute",
        help="what becomes of the youngest sequence where the pool runs out (recompute)",
    )
    group.add_argument(
        "--max-num-seqs", type=whole(1), default=256, metavar="N", help="running at once (256)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=whole(1),
        metavar="N",
        help="tokens of a step, and so of a prompt's chunk (2048 on a GPU, 512 on a CPU)",
    )
    group.add_argument(
        "--max-model-len",
        type=whole(1),
        metavar="N",
        help="tokens of prompt and answer together (the model's own)",
    )


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model, here or behind a server",
        description="Talks with a model in the terminal: with an engine in this process, or with "
        "a server of OpenAI's API. From a pipe, each line is a question; only the answers go to "
        "stdout.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message for the chat template")
    parser.add_argument(
        "--stats",
        action="store_true",
        help="after each answer tokens, cached ones, speed, on stderr",
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        metavar="URL",
        help="of the API, as in http://127.0.0.1:8000/v1, instead of an engine here",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="($MLX_PAGED_API_KEY, else $OPENAI_API_KEY)"
    )
    add_sampling(parser)
    before = set(vars(parser.parse_args([])))
    _add_model(parser)
    _add_pool(parser)
    defaults = vars(parser.parse_args([]))
    # The server chooses its own model; which of the engine's options were given shows below.
    local = {name: defaults[name] for name in defaults if name not in before and name != "model"}
    parser.set_defaults(model=None, local_defaults=local)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what is installed, chosen and possible here",
        description="Shows device, versions, attention path, memory for the pool, BLAS and demo "
        "weights. Exit status 1 if something that is needed is missing.",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    _add_model(parser)
    _add_pool(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=whole(1), default=256, metavar="N", help="at most N tokens (256)"
    )
    group.add_argument(
        "--temp", type=number(0), default=0.0, metavar="T", help="temperature; 0 is greedy (0)"
    )
    group.add_argument(
        "--top-p", type=number(0, 1, above=True), default=1.0, metavar="P", help="nucleus (1: off)"
    )
    group.add_argument(
        "--top-k", type=whole(0), default=0, metavar="K", help="most likely K tokens (0: off)"
    )
    group.add_argument(
        "--min-p",
        type=number(0, 1),
        default=0.0,
        metavar="P",
        help="tokens at least P times as likely as the likeliest (0: off)",
    )
    group.add_argument(
        "--seed", type=whole(0, MAX_SEED), metavar="N", help="the same seed, the same text"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", default="smollm2", help=f"{MODEL_HELP} (smollm2)")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto: as stored on a GPU, float32 and dequantised on a CPU",
    )


def _add_pool(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV cache")
    group.add_argument(
        "--block-size",
        type=whole(1, MAX_BLOCK_SIZE),
        default=16,
        metavar="N",
        help=f"tokens per block, 1 to {MAX_BLOCK_SIZE} (16)",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--num-blocks", type=whole(1), metavar="N", help="blocks in the pool")
    size.add_argument(
        "--kv-memory", type=number(0, above=True), metavar="GIB", help="memory of the pool in GiB"
    )
    group.add_argument(
        "--kv-bits",
        type=int,
        choices=KV_BITS,
        help="store K and V in codes of so many bits (the model's own precision)",
    )
    group.add_argument(
        "--kv-group-size",
        type=int,
        choices=KV_GROUP_SIZES,
        default=32,
        help="with --kv-bits, elements that share a scale and a bias (32)",
    )
    group.add_argument(
        "--attention",
        choices=("auto", "metal", "gather"),
        default="auto",
        help="Metal kernels, or gathering with MLX operations",
    )
