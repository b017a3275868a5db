#!/usr/bin/env bash
# Fetches kustomize of a newer Debian: fetch.sh DIRECTORY. Needs Debian, no root; installs nothing.
# It comes from the sources of this machine's apt, with state of apt's own in the directory, and lies then at
# DIRECTORY/usr/bin/kustomize. Debian 12 has only one from 2019 inside kubectl, which knows half of what deploy/ says.
set -euo pipefail
readonly newer=trixie keyring=/usr/share/keyrings/debian-archive-keyring.gpg
rm -rf "$1"
mkdir -p "$1/apt/lists/partial" "$1/apt/archives/partial"
directory=$(realpath "$1")
cd "$directory"

apt-get indextargets --format 'deb [signed-by='$keyring'] $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    'Origin: Debian' "Release: $(. /etc/os-release && echo "$VERSION_CODENAME")" | sed -E "s/ [^ ]+ ([^ ]+)$/ $newer \1/" > apt/newer.list
[ -s apt/newer.list ] || { echo "apt knows no index of Debian's yet: apt-get update" >&2; exit 1; }

from_newer() {
    apt-get -qq -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=5 \
        -o Dir::State::Lists="$directory/apt/lists" -o Dir::Cache="$directory/apt" \
        -o Dir::Etc::SourceList="$directory/apt/newer.list" -o Dir::Etc::SourceParts=- "$@"
}
from_newer update
from_newer download "kustomize/$newer"
dpkg-deb --fsys-tarfile kustomize_*.deb | tar -x --no-same-owner ./usr/bin/kustomize
rm -r apt kustomize_*.deb
