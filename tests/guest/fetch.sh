#!/usr/bin/env bash
# Fetches what the test guest is made of from Debian: fetch.sh DIRECTORY. Needs Debian on amd64, no root; installs nothing.
# All comes from the sources of this machine's apt, with state of apt's own in the directory:
#   DIRECTORY/layer  what the guest has over this machine's root: a kernel with its modules, kmod, udev, systemd, busybox
#   DIRECTORY/qemu   a root with a QEMU that has vfio-user-pci (10.1) and all that it needs, from a newer release
set -euo pipefail
readonly newer=trixie keyring=/usr/share/keyrings/debian-archive-keyring.gpg
rm -rf "$1"
mkdir -p "$1"
directory=$(realpath "$1")
cd "$directory"

# apt-get or apt-cache with lists and packages of its own in apt/NAME: apt NAME get|cache COMMAND...
apt() {
    local state=$directory/apt/$1 tool=apt-$2
    shift 2
    mkdir -p "$state/lists/partial" "$state/archives/partial"
    "$tool" -qq -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=5 \
        -o Dir::State::Lists="$state/lists" -o Dir::Cache="$state" -o Dir::Cache::Archives="$state/archives" "$@"
}

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
(cd apt/here/archives && apt here get download "$kernel")
from_here=(install --download-only --yes --no-install-recommends)
apt here get "${from_here[@]}" kmod udev systemd busybox-static iproute2
apt here get "${from_here[@]}" --reinstall kmod busybox-static # the layer itself needs these, wherever else they are
unpack layer apt/here/archives/*.deb
release=$(basename layer/lib/modules/*)
(exec -a depmod layer/bin/kmod -b layer "$release")

echo "-- QEMU"
apt here get indextargets --format 'deb [signed-by='$keyring'] $(REPO_URI) $(RELEASE) $(COMPONENT)' \
    'Created-By: Packages' 'Origin: Debian' "Release: $(. /etc/os-release && echo "$VERSION_CODENAME")" > apt/release.list
for suite in $newer $newer-backports; do
    sed -E "s/ [^ ]+ ([^ ]+)$/ $suite \1/" apt/release.list
done > apt/newer.list
: > apt/nothing-installed
from_newer=(-o Dir::Etc::SourceList="$directory/apt/newer.list" -o Dir::Etc::SourceParts=- -o Dir::State::Status="$directory/apt/nothing-installed")
apt newer get "${from_newer[@]}" update
apt newer get "${from_newer[@]}" install --download-only --yes --no-install-recommends --target-release $newer-backports qemu-system-x86
unpack qemu apt/newer/archives/*.deb
rm -r apt
