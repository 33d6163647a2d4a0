#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The one entry of container and systemd unit.
#
#   entry.sh [serve] [SERVER FLAGS]          start the server with the recipe's flags
#   entry.sh doctor|plan|bench|probe ...     the operator's command line
#   entry.sh health                          exit 0 if the server answers
#
#   KDTREE_RECIPE        flags, a YAML file for --config        default /etc/kdtree/recipe.yaml
#   KDTREE_HOST, _PORT   address to bind                        default 127.0.0.1, 30000
#   KDTREE_API_KEY_FILE  file with the API key                  default: systemd's credential "api-key", if any
#   KDTREE_PYTHON        interpreter with the fork installed    default /opt/kdtree/bin/python
set -euo pipefail
umask 077

python=${KDTREE_PYTHON:-/opt/kdtree/bin/python}
recipe=${KDTREE_RECIPE:-/etc/kdtree/recipe.yaml}
host=${KDTREE_HOST:-127.0.0.1}
port=${KDTREE_PORT:-30000}
key_file=${KDTREE_API_KEY_FILE:-}
if [[ -z $key_file && -e ${CREDENTIALS_DIRECTORY:-/nowhere}/api-key ]]; then
  key_file=$CREDENTIALS_DIRECTORY/api-key
fi

refuse() {
  echo "entry.sh: $1" >&2
  exit 2
}

case ${1:-serve} in
  doctor | plan | bench | probe | schema) exec "$python" -m sglang.kdtree "$@" ;;
  health)
    exec "$python" -c 'import sys, urllib.request as u; sys.exit(u.urlopen(sys.argv[1], timeout=5).status != 200)' \
      "http://127.0.0.1:$port/health"
    ;;
  serve) [[ $# -eq 0 ]] || shift ;;
  -*) ;;
  *) refuse "unknown command '$1': serve, health, doctor, plan, bench or probe" ;;
esac

# The last of two flags counts, and a flag may be cut short: one here would pass the check of the address below.
for flag in "$@"; do
  [[ ! $flag =~ ^--(hos?t?|por?t?|api-ke?y?)(=|$) ]] || refuse "$flag: set KDTREE_HOST, KDTREE_PORT or KDTREE_API_KEY_FILE"
done

[[ -r $recipe ]] || refuse "cannot read the recipe $recipe: set KDTREE_RECIPE"
config=$(mktemp --suffix=.yaml)
cat -- "$recipe" >"$config"

# The key goes into the file, not onto the command line, where every user of the machine could read it.
if [[ -n $key_file ]]; then
  [[ -r $key_file ]] || refuse "cannot read the API key $key_file as uid $UID"
  key=$(<"$key_file")
  [[ $key =~ ^[A-Za-z0-9._-]{16,}$ ]] || refuse "$key_file: a key of at least 16 letters, digits, dots, dashes is needed"
  printf '\napi-key: "%s"\n' "$key" >>"$config"
elif [[ ! $host =~ ^(127(\.[0-9]{1,3}){3}|localhost|::1)$ ]]; then
  refuse "KDTREE_HOST=$host is open to the network and there is no API key: set KDTREE_API_KEY_FILE"
fi

export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec "$python" -m sglang.launch_server --config "$config" --host "$host" --port "$port" "$@"
