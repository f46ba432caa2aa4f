"""The commands of build.sh."""

import argparse
import sys
from pathlib import Path

from mla_fp8kv_build import pin as pins
from mla_fp8kv_build import arch, bundle, env, files, series, site, toolchain, wheel
from mla_fp8kv_build.errors import BuildError, disk_full
from mla_fp8kv_build.paths import BUILD, DIST, cache
from mla_fp8kv_build.steps import Steps


def main(arguments: list[str]) -> int:
    """Run one command; failures the user can act on are one sentence on stderr."""
    options, rest = _parser().parse_known_args(arguments)
    if rest and options.command != "test":
        print(f"error: build.sh does not know {rest[0]}; see './build.sh --help'.", file=sys.stderr)
        return 2
    try:
        return options.run(options, rest) or 0
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        if not disk_full(error):
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        print(
            f"error: Disk full{where}; the build needs 3 GB in the checkout and in {cache()}.",
            file=sys.stderr,
        )
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./build.sh",
        description="Builds FlashInfer with native FP8 KV for MLA; without a command, the wheel.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--base",
        default=pins.DEFAULT_BASE,
        metavar="VERSION",
        help=f"FlashInfer release to build on (default {pins.DEFAULT_BASE})",
    )
    parser.set_defaults(run=_wheel, command="wheel")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(run=run, command=name)
        return added

    command("wheel", _wheel, "build and check the wheel (the default)")
    patches = command("patches", _patches, "export the patch series")
    patches.add_argument("action", choices=["refresh"])
    patches.add_argument("into", nargs="?", help="patch that takes the edits (default: the last)")
    bundle_command = command("bundle", _bundle, "make an offline bundle for a GPU server")
    bundle_command.add_argument("--arch", required=True, metavar="LIST", help="such as 90a,120a")
    bundle_command.add_argument("-o", dest="output", type=Path, metavar="FILE")
    bundle_command.add_argument("--python", default="3.12", help="Python version of the server")
    return parser


def _wheel(options: argparse.Namespace, _: list[str]) -> None:
    pin = pins.load(options.base)
    steps = Steps()
    path = wheel.build(pin, steps)
    print(f"  {'total':<10} {steps.total():6.1f} s")
    print(path)
    print(f"install with: python3 -m pip install --no-deps --force-reinstall '{path}'")


def _patches(options: argparse.Namespace, _: list[str]) -> None:
    pin = pins.load(options.base)
    with files.lock(BUILD / "lock"):
        wheel.pristine(pin, Steps())
        changed = series.refresh(pin, options.into)
    print("\n".join(f"wrote {name}" for name in changed) or "every patch is as exported")


def _bundle(options: argparse.Namespace, _: list[str]) -> None:
    archs = arch.parse_list(options.arch)
    pin = pins.load(options.base)
    toolkit = toolchain.find()
    steps = Steps()
    built = wheel.build(pin, steps)
    with steps.step("site"):
        unpacked = site.unpacked(pin, built)
        python = env.ensure("dev")
    name = f"mla-fp8kv-{pin.version}-{'-'.join(one.name for one in archs)}.tar.gz"
    target = (options.output or DIST / name).resolve()
    with files.lock(BUILD / "bundle.lock"):
        bundle.bundle(pin, python, unpacked, archs, toolkit, options.python, target, steps)
    print(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")
