#!/bin/sh
# Makes a virtual environment with what some locks name, and says how large it gets and how far it is:
#   PYTHON=python3 tools/environment.sh DIRECTORY LOCK...
set -eu
python=${PYTHON:-python3} into=$1
shift

command -v "$python" > /dev/null || {
    echo "There is no $python here; docs/installing.md names the package." >&2
    exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fairlead needs Python 3.11 or newer and this is %s; name another: make PYTHON=python3.12" % sys.version.split()[0])'
"$python" -c 'import ensurepip, venv' 2> /dev/null || {
    echo "$python cannot make virtual environments; Debian and Ubuntu have that in the package python3-venv" >&2
    exit 1
}

requirements='' packages=0
for lock; do
    requirements="$requirements --requirement requirements/$lock.txt"
    packages=$((packages + $(grep -c '^[a-z].*==' "requirements/$lock.txt")))
done
case $* in
    dev) size=530 target=test ;;
    test) size=70 target=test ;;
    docs) size=165 target=site ;;
    *) size=45 target=demo ;;
esac
echo "-- installing $packages packages ($*) into $into, once: $size MB in all"

megabytes() {
    du -sm "$into" 2> /dev/null | cut -f1
}

# What is fetched lies in the directory, too, until it is installed. Ends with the script, however that ends.
progress() {
    began=$(date +%s) pause=5 most=0 # to look at so many files takes a while
    [ ! -t 1 ] || pause=1
    while kill -0 $$ 2> /dev/null; do
        now=$(($(date +%s) - began)) has=$(($(megabytes) - empty))
        [ "$has" -lt "$most" ] || most=$has # what was fetched is removed when it is installed
        if [ -t 1 ]; then
            printf '\r   %4d of %d MB after %d s ' "$most" "$((size - empty))" "$now"
        elif [ "$now" -gt 0 ]; then
            echo "   $most of $((size - empty)) MB after $now s"
        fi
        sleep "$pause" > /dev/null 2>&1
    done
}

"$python" -m venv "$into"
rm -rf "$into/fetched"
mkdir "$into/fetched"
empty=$(megabytes)
progress &
trap 'kill $! 2> /dev/null; [ ! -t 1 ] || echo' EXIT
install="$into/bin/python -m pip --quiet --disable-pip-version-check install --no-deps"
# shellcheck disable=SC2086 # several words each
TMPDIR=$(cd "$into/fetched" && pwd) $install --require-hashes $requirements 2> "$into/pip.log" || {
    cat "$into/pip.log" >&2
    ! grep -q CERTIFICATE_VERIFY_FAILED "$into/pip.log" ||
        echo "A proxy opens TLS: give pip its authority, PIP_CERT=/path/ca.pem make $target (docs/installing.md)" >&2
    exit 1
}
rm -r "$into/fetched"
[ "$*" = docs ] || $install --no-build-isolation --editable .
