#!/bin/sh
# Installs Fairlead below a prefix, or removes it: install.sh install | uninstall. `make install` and `make deb` run it.
#   PREFIX   where (/usr/local); the configuration is /etc/fairlead/config.toml wherever that is
#   DESTDIR  goes before every path that is written, and into none
#   PYTHON   the Python that the program runs with (python3)
#   TOOLS    a Python that has pip, and what requirements/build.txt pins
# An update replaces the program at once or not at all. The service goes on with the one that it has begun with.
set -eu
cd "$(dirname "$0")/.."
prefix=${PREFIX:-/usr/local}
target=${DESTDIR:-}$prefix
home=$prefix/lib/fairlead # the virtual environment; pip is not part of it
site=share/zsh/site-functions

# Every file and directory that is ours alone, below the prefix.
ours="lib/fairlead sbin/fairlead share/fairlead share/doc/fairlead lib/systemd/system/fairlead.service
    lib/sysusers.d/fairlead.conf lib/tmpfiles.d/fairlead.conf share/man/man8/fairlead.8
    share/bash-completion/completions/fairlead $site/_fairlead share/fish/vendor_completions.d/fairlead.fish"

# Writes stdin to a file below the prefix: put FILE [MODE]
put() {
    mkdir -p "$target/${1%/*}"
    cat > "$target/$1.new"
    chmod "${2:-644}" "$target/$1.new"
    mv "$target/$1.new" "$target/$1"
}

install() {
    umask 022
    python=$("${PYTHON:-python3}" -c 'import sys
if sys.version_info < (3, 11):
    sys.exit(f"Fairlead needs Python 3.11 or newer, and {sys.executable} is older: name another with PYTHON=")
print(sys._base_executable)')
    case $python in /root/* | /home/* | /run/user/*)
        echo "The service cannot see $python (ProtectHome=yes in its unit): name another with PYTHON=/usr/bin/python3" >&2
        exit 1 ;;
    esac
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch" "$target/lib/fairlead.new"' EXIT
    mkdir "$scratch/source"
    cp -R agent backends pyproject.toml README.md LICENSE "$scratch/source" # setuptools builds in place
    "$TOOLS" -m pip --quiet --quiet wheel --no-deps --no-build-isolation --wheel-dir "$scratch" "$scratch/source"

    new=$target/lib/fairlead.new
    rm -rf "$new"
    mkdir -p "$target/lib" "$target/sbin"
    "$python" -m venv --without-pip "$new"
    pip() { "$TOOLS" -m pip --quiet --quiet --python "$new/bin/python3" install --no-compile "$@"; }
    pip --only-binary :all: --require-hashes --requirement requirements/run.txt
    pip --no-deps --no-index --find-links "$scratch" fairlead # by its name: of a file it would note where that was
    for file in "$new"/bin/*; do
        case ${file##*/} in fairlead | python*) ;; *) rm "$file" ;; esac
    done
    rm -r "$new/include"
    sed -i "1s|.*|#!$home/bin/python3|" "$new/bin/fairlead"
    sed -i '/^\(command\|executable\) /d' "$new/pyvenv.cfg" # where it was made, and how
    find "$new" -name RECORD -delete # what pip would uninstall; it has bin/fairlead as it was
    # No change of a file's time makes such byte-code void, and the service could not write any.
    PYTHONHASHSEED=0 "$new/bin/python3" -m compileall -q -j 0 --invalidation-mode unchecked-hash -s "$new" -p "$home" "$new/lib"
    rm -rf "$target/lib/fairlead.old"
    [ ! -e "$target/lib/fairlead" ] || mv "$target/lib/fairlead" "$target/lib/fairlead.old"
    mv "$new" "$target/lib/fairlead"
    rm -rf "$target/lib/fairlead.old"
    ln -sfn ../lib/fairlead/bin/fairlead "$target/sbin/fairlead"

    fairlead() { "$target/lib/fairlead/bin/python3" "$target/lib/fairlead/bin/fairlead" "$@"; }
    fairlead manual | put share/man/man8/fairlead.8
    fairlead completion bash | put share/bash-completion/completions/fairlead
    fairlead completion zsh | put "$site/_fairlead"
    fairlead completion fish | put share/fish/vendor_completions.d/fairlead.fish
    sed "s|/opt/fairlead/bin/fairlead|$home/bin/fairlead|" deploy/systemd/fairlead.service | put lib/systemd/system/fairlead.service
    put lib/sysusers.d/fairlead.conf < deploy/systemd/sysusers.conf
    put lib/tmpfiles.d/fairlead.conf < deploy/systemd/tmpfiles.conf
    put share/fairlead/hardware.conf < deploy/systemd/fairlead.service.d/hardware.conf
    put share/fairlead/replace.sh 755 < deploy/systemd/replace.sh
    put share/doc/fairlead/config.example.toml < config.example.toml
}

uninstall() {
    for path in $ours; do
        rm -rf "${target:?}/$path"
    done
}

case ${1:-} in
install | uninstall) "$1" ;;
*) echo "install.sh install | uninstall" >&2; exit 2 ;;
esac
