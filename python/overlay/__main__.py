# SPDX-License-Identifier: Apache-2.0
"""The overlay tool; run it as `python -m overlay COMMAND` in python/."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import delta, drift, pack, release, series, sign, tree
from .errors import Refused
from .plan import FORK, make_plan
from .upstream import load_pin, pinned_wheel, repin


def check(args: argparse.Namespace) -> int:
    plan = make_plan(FORK, pinned_wheel(load_pin(FORK)))
    series.check(FORK, plan)
    delta.check_caps(plan, delta.load_caps(FORK))
    print(f"every anchor found, no file shadowed: {delta.line(plan, load_pin(FORK))}")
    return 0


def build(args: argparse.Namespace) -> int:
    started, pin = time.monotonic(), load_pin(FORK)
    wheel = pinned_wheel(pin)
    target = pack.build(FORK, pin, wheel, make_plan(FORK, wheel), args.out)
    print(f"{target} ({target.stat().st_size / 1e6:.1f} MB, {time.monotonic() - started:.1f} s)")
    return 0


def place(args: argparse.Namespace) -> int:
    pin = load_pin(FORK)
    wheel = pinned_wheel(pin)
    plan = make_plan(FORK, wheel, without=args.without)
    tree.install(plan, pin, wheel, args.site, linked=args.command == "link")
    print(f"{args.command}: {len(plan.own)} files of ours and {len(plan.edited)} edited modules in {args.site}")
    return 0


def show_delta(args: argparse.Namespace) -> int:
    pin = load_pin(FORK)
    plan = make_plan(FORK, pinned_wheel(pin))
    caps = delta.load_caps(FORK)
    if args.write:
        delta.write_line(args.write, plan, pin)
    else:
        print(delta.report(plan, pin, caps))
    delta.check_caps(plan, caps)
    return 0


def show_drift(args: argparse.Namespace) -> int:
    report, clean = drift.report(FORK, load_pin(FORK), args.to)
    print(report)
    return 0 if clean else 1


def pin_version(args: argparse.Namespace) -> int:
    print("\n".join(repin(FORK, load_pin(FORK), args.to)))
    return 0


def sign_edits(args: argparse.Namespace) -> int:
    changed = sign.sign(FORK, pinned_wheel(load_pin(FORK)))
    print("\n".join(changed) or "every edit was signed already")
    return 0


def patches(args: argparse.Namespace) -> int:
    written = series.write(FORK, load_pin(FORK), args.out)
    print("\n".join(str(path) for path in written))
    return 0


def make_release(args: argparse.Namespace) -> int:
    pin = load_pin(FORK)
    written = release.build(FORK, pin, args.out, args.tag or pin.sha256, cuda=args.cuda, dirty=args.dirty)
    print("\n".join(str(path) for path in written))
    return 0


def check_release(args: argparse.Namespace) -> int:
    sbom = release.check(FORK, load_pin(FORK), args.out, args.environment, lambda text: print(text, flush=True))
    print(f"the release answers as recorded; {sbom}")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="overlay", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    command("check", check, "resolve every edit against the pinned wheel and check the caps; write nothing")
    sub = command("build", build, "write the fork's wheel")
    sub.add_argument("--out", type=Path, default=Path("dist"), help="directory for the wheel (default: dist)")
    for name, how in (("link", "symlink our files"), ("lay", "copy our files")):
        sub = command(name, place, f"{how} into an installed tree of the pinned version and write the edited modules")
        sub.add_argument("site", type=Path, help="site-packages directory")
        sub.add_argument("--without", action="append", default=[], metavar="EDIT", help="leave this edit out")
    sub = command("drift", show_drift, "report what another upstream version would change for us; exit 1 if anything")
    sub.add_argument("--to", required=True, metavar="VERSION", help="a version, or: newest, previous")
    sub = command("pin", pin_version, "write another upstream version and its wheels' sha256 into UPSTREAM.toml")
    sub.add_argument("--to", required=True, metavar="VERSION")
    sub = command("delta", show_delta, "print the size of the fork and the edits we would like to lose")
    sub.add_argument("--write", type=Path, metavar="README", help="instead, bring the document's delta line up to date")
    command("sign", sign_edits, "write the hash of each edited symbol at the pin; do it after reviewing the symbol")
    sub = command("pr", patches, "write the fork as patches for `git am` on the pinned upstream tree")
    sub.add_argument("--out", type=Path, default=Path("patches"), help="directory for the patches (default: patches)")
    sub = command("release", make_release, "write the wheels of a release and their sums, from a clean commit")
    sub.add_argument("--out", type=Path, default=Path("../dist"), help="directory for the wheels (default: ../dist)")
    sub.add_argument("--tag", action="append", help="a wheel tag of UPSTREAM.toml (default: each)")
    sub.add_argument("--cuda", action="store_true", help="also the kernel package with CUDA code; compiles for minutes")
    sub.add_argument("--dirty", action="store_true", help="for trying: do not ask for a clean commit")
    sub = command(
        "check-release", check_release, "install a release into a new environment, serve from it, write its SBOM"
    )
    sub.add_argument("--out", type=Path, default=Path("../dist"), help="directory of the release (default: ../dist)")
    where = Path(f"../dist/check-cp{sys.version_info.major}{sys.version_info.minor}")
    sub.add_argument(
        "--environment", type=Path, default=where, help="where to make the environment (default: %(default)s)"
    )
    return top


def main() -> int:
    args = parser().parse_args()
    try:
        code = args.run(args)
        sys.stdout.flush()
    except Refused as refusal:
        print("overlay: refused, nothing was written:", *refusal.reasons, sep="\n  ", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        sys.stdout = open(os.devnull, "w")
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
