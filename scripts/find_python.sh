#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Print the interpreter that set-up uses: find_python.sh [PYTHON]. The one that is named; else the one of .venv, so that
# `make test` after `make PYTHON=python3.12 serve` keeps what is there; else the first that upstream has a wheel for.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
named=${1:-}

# The file that runs, not a launcher that looks for it each time.
print_file() {
    file=$("$1" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))' 2>/dev/null) || return 1
    "$file" -c '' 2>/dev/null && echo "$file"
}

if [ -n "$named" ]; then
    print_file "$named" && exit
    echo "setup: PYTHON=$named does not run: install it, or name another interpreter" >&2
    exit 1
fi

if [ -e "$root/.venv/stamps/environment" ]; then
    print_file "$root/.venv/bin/python" && exit
fi

versions=$(sed -n 's/^cp\([0-9]\)\([0-9]*\)-.*/\1.\2/p' "$root/python/UPSTREAM.toml" | sort -t. -k2 -n -u)
for version in $versions; do
    print_file "python$version" && exit
done

# Any other Python can at least say what is wrong with it.
print_file python3 && exit

# shellcheck disable=SC2086  # the versions are words
echo "setup: no Python here; install one of these: $(echo $versions | sed 's/ /, /g'), with venv" \
    "(Debian, Ubuntu: apt install python3 python3-venv)" >&2
exit 1
