#!/usr/bin/env bash
# Fetches files of a newer Debian's package: fetch.sh DIRECTORY PACKAGE FILE... Needs Debian, no root; installs nothing.
# They come from the sources of this machine's apt, by way of the cache that tests/cache.sh keeps, and lie then at
# DIRECTORY/FILE. Debian 12 has a kustomize from 2019 inside kubectl, which knows half of what deploy/ says.
set -euo pipefail
readonly newer=trixie keyring=/usr/share/keyrings/debian-archive-keyring.gpg
. "$(dirname "$0")/../cache.sh"
directory=$1 package=$2
shift 2
rm -rf "$directory"
mkdir -p "$directory"
cd "$directory"

apt-get indextargets --format 'deb [signed-by='$keyring'] $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    'Origin: Debian' "Release: $(. /etc/os-release && echo "$VERSION_CODENAME")" | sed -E "s/ [^ ]+ ([^ ]+)$/ $newer \1/" > newer.list
[ -s newer.list ] || { echo "apt knows no index of Debian's yet: apt-get update" >&2; exit 1; }
from_newer=(-o Dir::Etc::SourceList="$PWD/newer.list" -o Dir::Etc::SourceParts=-)
apt newer get "${from_newer[@]}" update
fetch newer "${from_newer[@]}" download "$package/$newer" > packages
dpkg-deb --fsys-tarfile "$(cat packages)" | tar -x --no-same-owner "${@/#/./}"
rm newer.list packages
