#!/usr/bin/env bash
# Runs `make test` on a fresh Debian with its own Python: trees.sh [--user] [--hardware] SUITE [ARGUMENT OF PYTEST...],
# as in `trees.sh bookworm -m fast`. The tree has Python, make and no more, and a clean copy of HEAD; neither a real /sys
# nor devices, unless --hardware brings this machine's in. Tests run as root, or with --user as an ordinary user, who may
# have 1,024 files open. LOCK (dev) says which of requirements/ is installed, AGAIN which tests run once more afterwards.
#
# Needs Debian, root and mmdebstrap; PYTHON (.venv/bin/python) fetches the wheels. Trees and wheels are kept in
# ~/.cache/fairlead, with checksums, until what they are made from changes. All else lies in memory, in namespaces of
# its own: no mount and no file outlives this, however it ends.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,6s/^# //p' "$0"; exit 2; }
user=0 hardware=
while [[ $1 == --* ]]; do
    case $1 in
        --user) user=1000 ;;
        --hardware) hardware=yes ;;
        *) echo "There is no option $1." >&2; exit 2 ;;
    esac
    shift
done
readonly user hardware suite=$1
shift
cd "$(dirname "$0")/.."
command -v mmdebstrap > /dev/null || { echo "To make a tree of Debian: apt-get install mmdebstrap" >&2; exit 1; }
readonly python=${PYTHON:-.venv/bin/python} lock=${LOCK:-dev} keyring=/usr/share/keyrings/debian-archive-keyring.gpg
readonly cache=${XDG_CACHE_HOME:-~/.cache}/fairlead/trees
mkdir -p "$cache"
exec {busy}> "$cache/lock"
flock $busy # two at a time would make the same twice

# The name in the cache of what is made from the inputs on stdin.
named() { echo "$cache/$1-$(sha256sum | cut -c -16)"; }

# Is it there, and as it was made?
whole() { [ -d "$1" ] && (cd "$1" && sha256sum --check --status SHA256SUMS 2> /dev/null); }

# Puts what was made in a directory beside it in its place, in that of the one before.
keep() {
    (cd "$1.new" && sha256sum -- * > SHA256SUMS)
    rm -rf "${1%-*}"-????????????????
    mv "$1.new" "$1"
}

make_tree() {
    mmdebstrap --quiet --mode=root --variant=apt --aptopt='Acquire::Retries "5"' --include=python3,python3-venv,make \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook='echo user:x:1000:1000::/home/user:/bin/bash >> "$1/etc/passwd"; echo user:x:1000: >> "$1/etc/group"' \
        --customize-hook='rm -rf "$1"/var/cache/apt/*.bin "$1"/var/lib/apt/lists/*' \
        --customize-hook='chroot "$1" python3 -c "import sys; print(\"%d.%d\" % sys.version_info[:2])" > "$1/version"' \
        "$suite" "$1/tree.tar" <<< "$sources"
}

fetch_wheels() {
    local platforms=(--platform "linux_$(uname -m)") minor
    for minor in {36..5}; do platforms+=(--platform "manylinux_2_${minor}_$(uname -m)"); done
    for minor in 2014 2010 1; do platforms+=(--platform "manylinux${minor}_$(uname -m)"); done
    "$python" -m pip --quiet --disable-pip-version-check download --no-deps --require-hashes --only-binary=:all: \
        --python-version "$1" "${platforms[@]}" --dest "$2" --requirement "requirements/$lock.txt"
}

sources=$(apt-get indextargets --format "deb [signed-by=$keyring] \$(REPO_URI) \$(RELEASE) \$(COMPONENT)" 'Created-By: Packages' \
    'Origin: Debian' "Release: $(. /etc/os-release && echo "$VERSION_CODENAME")" | sed -E "s/ [^ ]+ ([^ ]+)$/ $suite \1/")
[ -n "$sources" ] || { echo "apt knows no index of Debian's yet: apt-get update" >&2; exit 1; }
tree=$({ echo "$sources"; declare -f make_tree; } | named "$suite")
if ! whole "$tree"; then
    echo "-- a tree of $suite"
    rm -rf "$tree.new"
    mkdir "$tree.new"
    make_tree "$tree.new"
    keep "$tree"
fi
version=$(tar --extract --to-stdout --file "$tree/tree.tar" ./version)
wheels=$({ declare -f fetch_wheels; cat "requirements/$lock.txt"; } | named "wheels-$lock-$version")
if ! whole "$wheels"; then
    echo "-- wheels of requirements/$lock.txt for Python $version"
    rm -rf "$wheels.new"
    mkdir "$wheels.new"
    fetch_wheels "$version" "$wheels.new"
    keep "$wheels"
fi
flock --unlock $busy

# Runs with namespaces of mounts and processes of its own. The tree becomes the root of the former, as in a container: in
# a plain chroot the kernel lets nobody make a user namespace.
inside() {
    set -euo pipefail
    local place=$1
    mount -t tmpfs -o mode=755 tree "$place"
    tar --extract --same-owner --directory "$place" --file "$tree/tree.tar" --exclude ./version
    install --directory --mode=755 --owner="$user" --group="$user" "$place/home/user" "$place/home/user/fairlead"
    git archive HEAD | tar --extract --no-same-owner --directory "$place/home/user/fairlead"
    chown --recursive "$user:$user" "$place/home/user"
    mkdir "$place/wheels"
    mount --bind -o ro "$wheels" "$place/wheels"
    mount -t proc proc "$place/proc"
    if [ "$hardware" ]; then
        mount --rbind /sys "$place/sys"
        mount --rbind /dev "$place/dev"
    else
        mkdir -p "$place/dev/shm"
        chmod 1777 "$place/dev/shm"
        mount -t devpts -o newinstance,ptmxmode=0666 devpts "$place/dev/pts"
    fi
    cp /etc/hosts "$place/etc/hosts"
    cd "$place"
    mount --move . /
    shift
    [ "$user" = 0 ] || ulimit -n 1024
    local arguments
    for arguments in "${*@Q}" ${AGAIN:+"$AGAIN"}; do
        chroot --userspec="$user:$user" --groups= . /usr/bin/env --ignore-environment HOME=/home/user LANG=C.UTF-8 \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels ${CI:+CI=$CI} \
            make --no-print-directory --directory=/home/user/fairlead test LOCK="$lock" ARGS="$arguments"
    done
}
export -f inside
export tree wheels user hardware lock

place=$(mktemp --directory)
trap 'kill -KILL $child 2> /dev/null || true; wait; rmdir "$place"' EXIT
trap 'exit 130' HUP INT TERM
child=
echo "-- $suite's Python $version, as $([ "$user" = 0 ] && echo root || echo an ordinary user)"
setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --propagation private bash -c 'inside "$@"' bash "$place" "$@" &
child=$!
wait $child
