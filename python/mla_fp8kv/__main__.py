"""`python -m mla_fp8kv`: doctor, verify and sglang-patch."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its result is the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mla_fp8kv", description="FP8 KV cache for MLA in FlashInfer."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="say whether it will work here; needs no GPU")
    commands.add_parser("verify", help="compile, then check parity and speed on this GPU")
    patch = commands.add_parser("sglang-patch", help="patch an SGLang that has no plug-ins")
    patch.add_argument("--revert", action="store_true", help="restore SGLang's own file")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        from . import doctor

        return doctor.main()
    if options.command == "verify":
        from . import verify

        return verify.main()
    from . import sglang_patch

    try:
        print(sglang_patch.run(options.revert))
    except sglang_patch.PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
