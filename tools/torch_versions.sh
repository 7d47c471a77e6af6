#!/usr/bin/env bash
# Runs the tests on each supported torch: a virtual environment per version, that torch first, then this checkout with
# that torch pinned, so that nothing installed after it can choose another build. Ends with a table.
#
#   tools/torch_versions.sh                              # every version, the whole suite
#   tools/torch_versions.sh -m 'not slow' tests/plan     # arguments go to pytest
#   TORCH_VERSIONS='2.11.0 2.13.0' tools/torch_versions.sh
#
#   TORCH_VERSIONS        versions to run on, in this order
#   TORCH_VERSIONS_DIR    where environments and logs are kept between runs; outside of the tree
#   PYTHON                the interpreter to build the environments with
#
# Exits with 0 if every version passed.
set -uo pipefail
cd "$(dirname "$0")/.."

versions=${TORCH_VERSIONS:-2.11.0 2.12.1 2.13.0 2.14.1 2.15.0}
home=${TORCH_VERSIONS_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/lockstep-torch-versions}
python=${PYTHON:-python3}
pip_flags=(--disable-pip-version-check --quiet)
mkdir -p "$home"

install_for() { # version, environment
  local version=$1 venv=$2 pins=$2/pins.txt stamp
  stamp=$(cat pyproject.toml <(echo "$version $PWD") | cksum)
  [ "$(cat "$venv/installed" 2>/dev/null)" = "$stamp" ] && return 0
  test -x "$venv/bin/python" || "$python" -m venv "$venv" || return 1
  echo "torch==$version" >"$pins"
  "$venv/bin/python" -m pip install "${pip_flags[@]}" "torch==$version" || return 1
  "$venv/bin/python" -m pip install "${pip_flags[@]}" -e '.[dev]' -c "$pins" || return 1
  echo "$stamp" >"$venv/installed"
}

rows=()
failed=0
for version in $versions; do
  venv=$home/torch-$version
  log=$home/torch-$version.log
  begin=$(date +%s)
  echo "== torch $version (log: $log)"
  found=-
  summary=
  if ! install_for "$version" "$venv" >"$log" 2>&1; then
    verdict="NOT INSTALLED"
    summary=$(grep -m1 -i error "$log")
    failed=1
  else
    found=$("$venv/bin/python" -c 'import torch; print(torch.__version__)' 2>>"$log")
    # The environment's own commands come first on the path: tests start `python` and `lockstep` too.
    if PATH=$venv/bin:$PATH "$venv/bin/python" -m pytest -p no:cacheprovider "$@" 2>&1 | tee -a "$log"; then
      verdict=passed
    else
      verdict=FAILED
      failed=1
    fi
    summary=$(grep -E '^=* ?[0-9]+ (passed|failed|error|skipped|deselected).* in ' "$log" | tail -1 | tr -d '=' | xargs)
  fi
  rows+=("$version|$found|$verdict|$(($(date +%s) - begin)) s|$summary")
done

echo
{
  echo "torch|found|verdict|time|tests"
  printf '%s\n' "${rows[@]}"
} | column -t -s '|' 2>/dev/null || printf '%s\n' "${rows[@]}"
exit "$failed"
