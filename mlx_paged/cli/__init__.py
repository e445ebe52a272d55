"""The command `mlx-paged`: one file per subcommand, run with one set of manners.

Nothing heavy is imported here, so that `mlx-paged --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlx_paged.cli import manners
from mlx_paged.cli.arguments import build_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status.

    0: done. 1: it can't be done, with a sentence on stderr. 2: the command line is wrong.
    130: interrupted. 141: whoever read the output closed it.
    """
    return manners.run(lambda: _dispatch(arguments))


def _dispatch(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return manners.USAGE
    if args.command == "doctor":
        from mlx_paged.cli import doctor

        return doctor.run(args)
    if args.command == "serve":
        from mlx_paged.cli import serve

        return serve.run(args)
    if args.command == "chat":
        from mlx_paged.cli import chat

        return chat.run(args)
    from mlx_paged.cli import generate

    return generate.run(args)
