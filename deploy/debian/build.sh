#!/bin/sh
# Builds the Debian package for this machine's Debian or Ubuntu: build.sh DIRECTORY. TOOLS is that of deploy/install.sh.
# Without debhelper: that is 16 packages on each machine that builds (Debian 12), and would spare few of the 60 lines in the
# scripts beside this, since its snippets restart a service.
# Two builds of the same sources with the same wheels are the same file; no file is younger than SOURCE_DATE_EPOCH.
set -eu
cd "$(dirname "$0")/../.."
output=$1
here=deploy/debian
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
umask 022
chmod 755 "$tree"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(date --date "$(sed -n '/^ -- /{s/.*>  //p;q}' $here/changelog)" +%s)}
export SOURCE_DATE_EPOCH

DESTDIR=$tree PREFIX=/usr PYTHON=/usr/bin/python3 deploy/install.sh install
install -D -m 644 config.example.toml "$tree/etc/fairlead/config.toml"
mv "$tree/usr/share/zsh/site-functions" "$tree/usr/share/zsh/vendor-completions" # where Debian's packages have them
doc=$tree/usr/share/doc/fairlead
install -m 644 $here/copyright "$doc/copyright"
install -m 644 CHANGELOG.md "$doc/changelog"
install -m 644 $here/changelog "$doc/changelog.Debian"
gzip -9n "$doc/changelog" "$doc/changelog.Debian" "$tree/usr/share/man/man8/fairlead.8"

control=$tree/DEBIAN
mkdir "$control"
echo /etc/fairlead/config.toml > "$control/conffiles"
install -m 755 $here/postinst $here/prerm $here/postrm "$control"
(cd "$tree" && find usr etc -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum) > "$control/md5sums"
# The same sources make another package on each release, for its Python: 0.1.0-1+deb12 is below 0.1.0-1+deb13.
release=$(. /etc/os-release && echo "${ID%ian}${VERSION_ID-}")
version=$(sed -n '1s/.*(\(.*\)).*/\1/p' $here/changelog)+$release
python=$(/usr/bin/python3 -c 'import sys; print("%d.%d %d.%d" % (*sys.version_info[:2], 3, sys.version_info[1] + 1))')
architecture=$(dpkg --print-architecture)
size=$(find "$tree" -type f -printf '%s\n' | awk '{kib += int(($1 + 1023) / 1024)} END {print kib}')
sed "s|VERSION|$version|; s|ARCHITECTURE|$architecture|; s|PYTHON|${python% *}|; s|NEXT|${python#* }~|; s|SIZE|$size|" \
    $here/control > "$control/control"

mkdir -p "$output"
rm -f "$output"/*.deb
dpkg-deb --root-owner-group -Zxz --build "$tree" "$output/fairlead_${version}_$architecture.deb"
