#!/usr/bin/env bash
# Writes the digest that the Containerfile's base has now beside its tag: `make pin-base`. It is that of the index, with
# which each platform gets its own image. Needs skopeo, and the registry within reach.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v skopeo > /dev/null || { echo "To look up a digest: apt-get install skopeo" >&2; exit 1; }
tag=$(sed -n 's/^ARG BASE=\([^@]*\).*$/\1/p' Containerfile)
index=$(mktemp)
trap 'rm "$index"' EXIT
skopeo inspect --raw "docker://$tag" > "$index"
for architecture in amd64 arm64; do
    grep -Eq "\"architecture\": ?\"$architecture\"" "$index" || { echo "$tag has no image for $architecture" >&2; exit 1; }
done
digest=sha256:$(sha256sum < "$index" | cut -d ' ' -f 1)
sed -i "s|^ARG BASE=.*|ARG BASE=$tag@$digest|" Containerfile
echo "$tag is $digest"
