#!/usr/bin/env bash
# Builds the image with podman, buildah or docker: `make image`, or build.sh [ARGUMENT OF THE BUILD...]. It leaves the
# image in the tool's own store, and for each platform an archive that containerd, podman and docker load, with the list
# of what is in it: build/image/fairlead-VERSION-ARCHITECTURE.tar and .cdx.json.
#   PLATFORMS  linux/amd64, linux/arm64 or both; this machine's own if not said. Another than that needs qemu's user
#              emulation, registered with the kernel (Debian: qemu-user-static, on a machine with systemd)
#   IMAGE      its name and tag; fairlead:VERSION if not said, as the manifests have it
#   BASE       what it is built on, in the place of the Containerfile's; "debian" makes that here, without a registry
#              (with docker for this machine's own platform alone: it keeps no other of what is imported)
#   TOOL       podman, buildah or docker; the first of them that works here if not said
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
image=${IMAGE:-fairlead:$version} into=${INTO:-build/image}
revision=$(git rev-parse HEAD 2> /dev/null || echo unknown) # a release's sources have no history
machine=$(uname -m)
machine=${machine/x86_64/amd64} machine=${machine/aarch64/arm64}

for tool in ${TOOL:-podman buildah docker}; do
    "$tool" info > /dev/null 2>&1 && break
    tool=
done
[ -n "$tool" ] || { echo "Nothing here builds images: ${TOOL:-podman, buildah and docker} cannot be used (\`info\` fails)." >&2; exit 1; }

# Makes an image of a tree's files: made_of TAR ARCHITECTURE NAME
made_of() {
    local container
    case $tool in
        podman) podman import --quiet --arch "$2" "$1" "$3" ;;
        docker) docker import --platform "linux/$2" "$1" "$3" ;;
        buildah)
            container=$(buildah from scratch)
            buildah config --arch "$2" "$container"
            buildah add --quiet "$container" "$1" /
            buildah commit --quiet --rm "$container" "$3" ;;
    esac > /dev/null
}

mkdir -p "$into"
for platform in ${PLATFORMS:-linux/$machine}; do
    architecture=${platform#linux/}
    archive=$into/fairlead-$version-$architecture.tar
    arguments=(--platform "$platform" --file Containerfile --tag "$image" --build-arg REVISION="$revision")
    base=${BASE:-}
    if [ "$base" = debian ]; then
        echo "-- a base of Debian's packages for $architecture"
        base=localhost/debian-python:$architecture
        deploy/image/base.sh "$architecture" "$into/base.tar"
        made_of "$into/base.tar" "$architecture" "$base"
        rm "$into/base.tar"
        [ "$tool" = docker ] || arguments+=(--pull=never)
    fi
    echo "-- $image for $platform, with $tool"
    "$tool" build "${arguments[@]}" ${base:+--build-arg BASE="$base"} --quiet "$@" . > /dev/null || {
        status=$?
        echo "If pip said CERTIFICATE_VERIFY_FAILED or reached nothing: docs/installing.md, \"Behind a proxy\"." >&2
        [ -n "$base" ] || echo "If the base could not be pulled: BASE=debian makes one of Debian's packages, without a registry." >&2
        exit $status
    }
    rm -f "$archive"
    case $tool in
        docker) docker save --output "$archive" "$image" ;;
        *) "$tool" push --quiet "$image" "docker-archive:$archive:$image" ;; # which has the name without podman's localhost/
    esac
    # The image has one layer, in which the list lies.
    layer=$(tar -xOf "$archive" manifest.json | sed 's/.*"Layers":\["\([^"]*\)"\].*/\1/')
    tar -xOf "$archive" "$layer" | gzip -cdf | tar -xO opt/fairlead/share/fairlead/sbom.cdx.json > "${archive%.tar}.cdx.json"
    ls -sh --si "$archive" "${archive%.tar}.cdx.json"
done
