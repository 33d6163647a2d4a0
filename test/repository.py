# SPDX-License-Identifier: Apache-2.0
"""git as the tests call it: alike whatever the machine's own settings are."""

import os
import subprocess
from pathlib import Path

PERSON = {"NAME": "reader", "EMAIL": "reader@example.org"}
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in PERSON.items()},
}


def git(tree: Path, *arguments: str) -> str:
    """What it prints; CalledProcessError if it fails."""
    command = ["git", "-C", tree, *arguments]
    return subprocess.run(command, check=True, env=ENVIRONMENT, capture_output=True, text=True).stdout


def commit_all(tree: Path) -> None:
    """A new repository of the files that are there, those in .gitignore left out."""
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "all")
