#!/usr/bin/env bash
# Fetches kustomize of a newer Debian: fetch.sh DIRECTORY. Needs Debian, no root; installs nothing.
# It comes from the sources of this machine's apt, by way of the cache that tests/cache.sh keeps, and lies then at
# DIRECTORY/usr/bin/kustomize. Debian 12 has only one from 2019 inside kubectl, which knows half of what deploy/ says.
set -euo pipefail
readonly newer=trixie keyring=/usr/share/keyrings/debian-archive-keyring.gpg
. "$(dirname "$0")/../cache.sh"
rm -rf "$1"
mkdir -p "$1"
cd "$1"

apt-get indextargets --format 'deb [signed-by='$keyring'] $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    'Origin: Debian' "Release: $(. /etc/os-release && echo "$VERSION_CODENAME")" | sed -E "s/ [^ ]+ ([^ ]+)$/ $newer \1/" > newer.list
[ -s newer.list ] || { echo "apt knows no index of Debian's yet: apt-get update" >&2; exit 1; }
from_newer=(-o Dir::Etc::SourceList="$PWD/newer.list" -o Dir::Etc::SourceParts=-)
apt kustomize get "${from_newer[@]}" update
fetch kustomize "${from_newer[@]}" download "kustomize/$newer" > packages
dpkg-deb --fsys-tarfile "$(cat packages)" | tar -x --no-same-owner ./usr/bin/kustomize
rm newer.list packages
