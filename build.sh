#!/usr/bin/env bash
# Finds a Python, lets it make the build environment, and hands over to python/mla_fp8kv_build.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$root/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1

usable='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))'
python=
for candidate in ${MLA_FP8KV_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
  if "$candidate" -c "$usable" >/dev/null 2>&1; then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then
  found=$("${MLA_FP8KV_PYTHON:-python3}" --version 2>&1 | tail -1) || true
  echo "error: Python 3.10 or newer with its venv module is needed; found ${found:-none}." >&2
  exit 1
fi

environment=$("$python" -m mla_fp8kv_build.env build)
exec "$environment" -m mla_fp8kv_build "$@"
