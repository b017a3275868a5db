#!/usr/bin/env bash
# Builds the image of the Containerfile without any image registry, and tries it: build.sh PYTHON, the latter to run
# tests/container/pod.py, the simulated kubelet and a browser with. The base is made of Debian's packages, from the
# sources of this machine's apt; pip inside the build has this machine's settings of pip.
# ARCHITECTURE=arm64 does so for arm64, by emulation, which takes several times as long.
# Needs Debian, root, buildah, chromium and mmdebstrap. Everything lies in a scratch directory and goes when this ends.
set -euo pipefail
python=$(realpath --no-symlinks "$1")
cd "$(dirname "$0")/../.."
for tool in buildah chromium mmdebstrap; do
    command -v "$tool" > /dev/null || { echo "To build the image: apt-get install $tool" >&2; exit 1; }
done
readonly most=40 # MB that the image may have over its base; it has 21
export PLATFORMS=linux/${ARCHITECTURE:-$(dpkg --print-architecture)} IMAGE=localhost/fairlead BASE=debian TOOL=buildah

scratch=$(mktemp --directory)
export INTO=$scratch CONTAINERS_STORAGE_CONF=$scratch/storage.conf BUILDAH_ISOLATION=chroot TMPDIR=$scratch
printf '[storage]\ndriver = "vfs"\ngraphroot = "%s/images"\nrunroot = "%s/run"\n' "$scratch" "$scratch" > "$scratch/storage.conf"
trap 'buildah rm --all > /dev/null || true; rm -rf --one-file-system "$scratch"' EXIT

python3 - "$scratch" <<'SETTINGS'
import configparser, os, pathlib, shutil, ssl, sys
scratch, home = pathlib.Path(sys.argv[1]), pathlib.Path.home()
user = os.environ.get("XDG_CONFIG_HOME", home / ".config")
settings = configparser.RawConfigParser()
settings.read_dict({"global": {"quiet": "2"}})
settings.read(["/etc/pip.conf", home / ".pip/pip.conf", f"{user}/pip/pip.conf", os.environ.get("PIP_CONFIG_FILE", os.devnull)])
for name, value in os.environ.items():
    if name.startswith("PIP_") and name != "PIP_CONFIG_FILE":
        settings.set("global", name.removeprefix("PIP_").lower().replace("_", "-"), value)
(scratch / "pip").mkdir()
if authorities := settings.get("global", "cert", fallback=ssl.get_default_verify_paths().cafile):
    shutil.copy(authorities, scratch / "pip/ca.pem")
    settings.set("global", "cert", "/etc/pip/ca.pem")
with (scratch / "pip.conf").open("w") as file:
    settings.write(file)
SETTINGS
deploy/image/build.sh --volume "$scratch/pip.conf:/etc/pip.conf:ro" --volume "$scratch/pip:/etc/pip:ro"

echo "-- what is in it"
image=$(buildah from --pull-never localhost/fairlead)
base=$(buildah from --pull-never "localhost/debian-python:${PLATFORMS#linux/}")
inside() { buildah run "$image" -- "$@"; }
buildah inspect --type image localhost/fairlead > "$scratch/image.json"
"$python" tests/container/settings.py "$scratch/image.json" "$(inside fairlead --version)"
inside sh -c 'for tool in cc gcc c++ g++ cpp ld as make pip pip3; do ! command -v $tool || exit; done' || { echo "The image has tools that build." >&2; exit 1; }
inside python3 -c 'import importlib.util as of, sys; sys.exit([name for name in ("pip", "ensurepip", "setuptools", "wheel") if of.find_spec(name)] or 0)'
inside python3 -c "$(cat tests/container/byte_code.py)"
inside modprobe --version > /dev/null
root=$(buildah mount "$image")
"$python" tests/container/contents.py "$root" "$scratch"/fairlead-*.cdx.json
megabytes() { du --summarize --apparent-size --one-file-system --block-size=1MB "$1" | cut -f 1; }
over=$(("$(megabytes "$root")" - "$(megabytes "$(buildah mount "$base")")"))
echo "unpacked it is $(megabytes "$root") MB, $over MB over its base"
[ "$over" -le "$most" ] || { echo "That is more than the $most MB that it may have." >&2; exit 1; }
for version in 3.11 3.13; do # Debian's, and that of the Containerfile's base; what has no wheel would need a compiler
    "${python%/*}/uv" pip install --quiet --dry-run --no-deps --require-hashes --only-binary :all: --target "$scratch/none" \
        --python-version $version --python-platform aarch64-manylinux2014 --requirement requirements/run.txt
done
echo "every requirement has a wheel for arm64"

echo "-- the program in it"
inside python3 -c 'import pyudev; pyudev.Context()'
inside python3 -c 'import pynvml'
inside fairlead discover --json | python3 -c 'import json, sys; print(*(one["name"] for one in json.load(sys.stdin)["resources"]))'
inside fairlead demo --seconds 3 --json | python3 -c 'import json, sys
for change in json.load(sys.stdin)["changes"] or sys.exit("The demo saw no change."):
    print("demo: {resource} {device}: {health} after {latency_ms} ms".format_map(change))'

echo "-- as the pods of deploy/kubernetes"
"$python" -m tests.container.pod "$root" "$scratch/image.json"
