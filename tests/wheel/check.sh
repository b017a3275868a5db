#!/usr/bin/env bash
# Does the wheel hold all of agent/ and backends/ and nothing else, and does requirements/run.txt suffice to run it?
# tests/wheel/check.sh PYTHON WHEEL [SOURCES]: PYTHON makes the throw-away environment that the wheel is installed in. The
# directory SOURCES is removed before, so that nothing can come from there.
set -euo pipefail
python=$(realpath --no-symlinks "$1") wheel=$(realpath "$2")
cd "$(dirname "$0")/../.."
scratch=$(mktemp --directory)
trap 'rm -rf "$scratch"' EXIT

find agent backends -type f -not -path '*/__pycache__/*' | LC_ALL=C sort > "$scratch/expected"
"$python" -m zipfile --list "$wheel" | awk 'NR > 1 {print $1}' | grep -v '\.dist-info/' | LC_ALL=C sort > "$scratch/found"
diff "$scratch/expected" "$scratch/found" || { echo "The wheel (>) does not hold what the packages (<) hold." >&2; exit 1; }

cp requirements/run.txt "$scratch"
cd "$scratch"
[ -z "${3:-}" ] || rm -rf "$3"

"$python" -m venv "$scratch/venv"
install=("$scratch/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check)
"${install[@]}" --require-hashes --only-binary :all: --requirement run.txt
"${install[@]}" --no-deps "$wheel"
"$scratch/venv/bin/python" -m pip --disable-pip-version-check check

venv/bin/python -W error - <<'EVERY_MODULE'
import importlib, pkgutil
import agent, backends
for package in agent, backends:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
EVERY_MODULE
fairlead=$scratch/venv/bin/fairlead
"$fairlead" --version
"$fairlead" validate
"$fairlead" discover --json > discovered.json
"$python" -c 'import json; print(*(found["name"] for found in json.load(open("discovered.json"))["resources"]))'
"$fairlead" demo --seconds 1 --json > demo.json # it registers, and devices come and go
