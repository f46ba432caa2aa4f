"""The commands of build.sh."""

import argparse
import sys
from pathlib import Path

from mla_fp8kv_build import (
    arch,
    bump,
    bundle,
    env,
    files,
    lint,
    resources,
    series,
    site,
    suite,
    toolchain,
    wheel,
)
from mla_fp8kv_build import pin as pins
from mla_fp8kv_build.errors import BuildError, disk_full
from mla_fp8kv_build.paths import BUILD, DIST, ROOT, cache
from mla_fp8kv_build.steps import Steps


def main(arguments: list[str]) -> int:
    """Run one command; failures the user can act on are one sentence on stderr."""
    options, rest = _parser().parse_known_args(arguments)
    if rest and options.command not in ("test", "bench"):
        print(f"error: build.sh does not know {rest[0]}; see './build.sh --help'.", file=sys.stderr)
        return 2
    try:
        return options.run(options, rest) or 0
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
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
    parser.set_defaults(run=_wheel, command="wheel", arch=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(run=run, command=name)
        return added

    wheel_command = command("wheel", _wheel, "build and check the wheel (the default)")
    wheel_command.add_argument(
        "--arch", metavar="LIST", help="compile our modules into it for these, such as 90a,120a"
    )
    patches = command("patches", _patches, "export the patch series")
    patches.add_argument("action", choices=["refresh"])
    patches.add_argument("into", nargs="?", help="patch that takes the edits (default: the last)")
    resource = command("resources", _resources, "registers, spills and shared memory of variants")
    resource.add_argument("--arch", metavar="LIST", help="such as 90a,120a (default: all)")
    resource.add_argument(
        "--compiler",
        metavar="LIST",
        help=f"also with those of these CUDA releases: {', '.join(toolchain.releases())}, or all",
    )
    resource.add_argument("--json", action="store_true", help="print JSON instead of the table")
    bundle_command = command("bundle", _bundle, "make an offline bundle for a GPU server")
    bundle_command.add_argument("--arch", required=True, metavar="LIST", help="such as 90a,120a")
    bundle_command.add_argument("-o", dest="output", type=Path, metavar="FILE")
    bundle_command.add_argument("--python", default="3.12", help="Python version of the server")
    test = command("test", _test, "run the tests that need no GPU; further arguments go to pytest")
    which = test.add_mutually_exclusive_group()
    which.add_argument("--sglang", action="store_true", help="the plug-in on the real SGLang")
    which.add_argument("--mutations", action="store_true", help="faults the tests must find")
    bumper = command("bump", _bump, "take the patch series to another FlashInfer release")
    bumper.add_argument("version", help="such as 0.7.4")
    linter = command("lint", _lint, "check formats, lint rules and the patch series")
    linter.add_argument("--fix", action="store_true", help="correct what the tools can")
    command("bench", _bench, "run bench/run.py on this machine's GPU; arguments go to it")
    return parser


def _wheel(options: argparse.Namespace, _: list[str]) -> None:
    pin = pins.load(options.base)
    steps = Steps()
    path = wheel.build(pin, steps)
    if options.arch:
        archs, toolkit = arch.parse_list(options.arch), toolchain.find()
        path = wheel.add_modules(pin, path, archs, toolkit, steps)
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


def _test(options: argparse.Namespace, rest: list[str]) -> int:
    pin = pins.load(options.base)
    if options.sglang:
        return suite.test_sglang(pin, rest)
    if options.mutations:
        return suite.test_mutations(pin, rest)
    return suite.test(pin, rest)


def _bump(options: argparse.Namespace, _: list[str]) -> None:
    old = pins.load(options.base)
    with files.lock(BUILD / "lock"):
        wheel.pristine(old, Steps())
        print(bump.bump(old, options.version))


def _lint(options: argparse.Namespace, _: list[str]) -> int:
    bases = [pins.load(version) for version in pins.supported()]
    with files.lock(BUILD / "lock"):
        for pin in bases:
            wheel.pristine(pin, Steps())
        return lint.lint(bases, options.fix)


def _bench(options: argparse.Namespace, rest: list[str]) -> int:
    pin = pins.load(options.base)
    return suite.run_python(pin, "dev", [str(ROOT / "bench" / "run.py"), *rest], Steps())


def _resources(options: argparse.Namespace, _: list[str]) -> int:
    archs = arch.parse_list(options.arch) if options.arch else list(arch.SUPPORTED)
    compilers = [toolchain.find()]
    for release in _releases(options.compiler or ""):
        other = toolchain.of_release(release)
        compilers += [other] * (other.name not in [one.name for one in compilers])
    with files.lock(BUILD / "resources.lock"):
        rows = resources.table(archs, compilers, toolchain.tvm_ffi_includes(env.ensure("dev")))
    if options.json:
        print(resources.as_json(rows))
        return int(any(row.problem for row in rows))
    print(resources.show(rows))
    for compiler in compilers:
        known = {row.arch for row in rows if row.compiler == compiler.name}
        for skipped in (one for one in archs if one.name not in known):
            print(f"sm_{skipped.name} is not known to {compiler.name}")
    return int(any(row.problem for row in rows))


def _releases(text: str) -> list[str]:
    return toolchain.releases() if text == "all" else [word for word in text.split(",") if word]
