#!/usr/bin/env bash
# Fetches what the test guest is made of from Debian: fetch.sh DIRECTORY. Needs Debian on amd64, no root; installs nothing.
# All comes from the sources of this machine's apt, whose signed index has the checksums of all packages. They are kept in
# $XDG_CACHE_HOME/fairlead (~/.cache/fairlead), so that the next clone downloads nothing that is there.
#   DIRECTORY/layer  what the guest has over this machine's root: a kernel with its modules, kmod, udev, systemd, busybox
#   DIRECTORY/qemu   a root with a QEMU that has vfio-user-pci (10.1) and all that it needs, from a newer release
set -euo pipefail
readonly newer=trixie keyring=/usr/share/keyrings/debian-archive-keyring.gpg
. "$(dirname "$0")/../cache.sh"
rm -rf "$1"
mkdir -p "$1"
cd "$1"

# Unpacks packages over a root whose /bin, /lib and so on are links into /usr, and keeps them: unpack ROOT PACKAGE...
unpack() {
    local root=$1 name
    shift
    for name in bin sbin lib lib64; do
        mkdir -p "$root/usr/$name"
        ln -sfn "usr/$name" "$root/$name"
    done
    for package; do
        dpkg-deb --fsys-tarfile "$package" | tar -x --directory "$root" --no-same-owner --keep-directory-symlink
    done
}

echo "-- the guest's kernel, and tools that this machine lacks"
apt here get update
kernel=$(apt here cache depends linux-image-amd64 | awk '/Depends: linux-image-/ {print $2}')
tools=(install --yes --no-install-recommends kmod udev systemd busybox-static iproute2)
again=(install --yes --no-install-recommends --reinstall kmod busybox-static) # the layer itself needs these, wherever else they are
fetch here download "$kernel" > packages
fetch here "${tools[@]}" >> packages
fetch here "${again[@]}" >> packages
mapfile -t packages < packages
unpack layer "${packages[@]}"
release=$(basename layer/lib/modules/*)
(exec -a depmod layer/bin/kmod -b layer "$release")

echo "-- QEMU"
apt here get indextargets --format 'deb [signed-by='$keyring'] $(REPO_URI) $(RELEASE) $(COMPONENT)' \
    'Created-By: Packages' 'Origin: Debian' "Release: $(. /etc/os-release && echo "$VERSION_CODENAME")" > release.list
for suite in $newer $newer-backports; do
    sed -E "s/ [^ ]+ ([^ ]+)$/ $suite \1/" release.list
done > newer.list
: > nothing-installed
from_newer=(-o Dir::Etc::SourceList="$PWD/newer.list" -o Dir::Etc::SourceParts=- -o Dir::State::Status="$PWD/nothing-installed")
apt newer get "${from_newer[@]}" update
fetch newer "${from_newer[@]}" install --yes --no-install-recommends --target-release $newer-backports qemu-system-x86 > packages
mapfile -t packages < packages
unpack qemu "${packages[@]}"
rm packages release.list newer.list nothing-installed
