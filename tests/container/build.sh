#!/usr/bin/env bash
# Builds the image of the Containerfile without any image registry, and tries it: build.sh PYTHON, the latter to run
# tests/container/pod.py and the simulated kubelet with. The base is made here of Debian's packages, from the sources of
# this machine's apt; pip inside the build has this machine's settings of pip.
# Needs Debian, root, buildah and mmdebstrap. Everything lies in a scratch directory and goes when this ends.
set -euo pipefail
python=$(realpath --no-symlinks "$1")
cd "$(dirname "$0")/../.."
for tool in buildah mmdebstrap; do
    command -v "$tool" > /dev/null || { echo "To build the image: apt-get install $tool" >&2; exit 1; }
done

scratch=$(mktemp --directory)
export CONTAINERS_STORAGE_CONF=$scratch/storage.conf BUILDAH_ISOLATION=chroot TMPDIR=$scratch
printf '[storage]\ndriver = "vfs"\ngraphroot = "%s/images"\nrunroot = "%s/run"\n' "$scratch" "$scratch" > "$scratch/storage.conf"
trap 'buildah rm --all > /dev/null || true; rm -rf --one-file-system "$scratch"' EXIT

echo "-- the base: this machine's Debian with Python"
codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' > "$scratch/sources.list"
[ -s "$scratch/sources.list" ] || { echo "apt knows no index of Debian's yet: apt-get update" >&2; exit 1; }
mmdebstrap --quiet --mode=root --variant=apt --aptopt='Acquire::Retries "5"' --include=python3,python3-venv,kmod,libudev1 \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$codename" "$scratch/base.tar" "$scratch/sources.list"
base=$(buildah from scratch)
buildah add --quiet "$base" "$scratch/base.tar" / > /dev/null
buildah commit --quiet --rm "$base" localhost/debian-python > /dev/null
rm "$scratch/base.tar"

echo "-- the image"
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
buildah build --quiet --pull-never --volume "$scratch/pip.conf:/etc/pip.conf:ro" --volume "$scratch/pip:/etc/pip:ro" \
    --build-arg BASE=localhost/debian-python --build-arg REVISION="$(git rev-parse HEAD)" --file Containerfile --tag localhost/fairlead . > /dev/null

echo "-- what is in it"
image=$(buildah from --pull-never localhost/fairlead)
inside() { buildah run "$image" -- "$@"; }
buildah inspect --type image localhost/fairlead > "$scratch/image.json"
"$python" tests/container/settings.py "$scratch/image.json" "$(inside fairlead --version)"
inside sh -c 'for tool in cc gcc c++ g++ cpp ld as make pip pip3; do ! command -v $tool || exit; done' || { echo "The image has tools that build." >&2; exit 1; }
inside python3 -c 'import importlib.util as of, sys; sys.exit([name for name in ("pip", "ensurepip", "setuptools", "wheel") if of.find_spec(name)] or 0)'
inside python3 -c "$(cat tests/container/byte_code.py)"
inside modprobe --version > /dev/null

echo "-- the program in it"
inside python3 -c 'import pyudev; pyudev.Context()'
inside fairlead discover --json | python3 -c 'import json, sys; print(*(one["name"] for one in json.load(sys.stdin)["resources"]))'
inside fairlead demo --seconds 3 --json | python3 -c 'import json, sys
for change in json.load(sys.stdin)["changes"] or sys.exit("The demo saw no change."):
    print("demo: {resource} {device}: {health} after {latency_ms} ms".format_map(change))'

echo "-- as the pods of deploy/kubernetes"
root=$(buildah mount "$image")
du --summarize --human-readable --one-file-system "$root" | awk '{print "unpacked it is " $1}'
"$python" -m tests.container.pod "$root" "$scratch/image.json"
