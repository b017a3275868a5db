#!/usr/bin/env bash
# Makes a base image's files without any registry: base.sh ARCHITECTURE TAR, the former amd64 or arm64. They are packages
# of this machine's Debian, with the checksums of its signed index: Python, kmod, libudev, and the licence of each.
# Needs Debian, root and mmdebstrap; for the other architecture also arch-test and
# qemu's user emulation (qemu-user-static).
set -euo pipefail
command -v mmdebstrap > /dev/null || { echo "To make a base of Debian's packages: apt-get install mmdebstrap" >&2; exit 1; }
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
sources=$(apt-get indextargets --format 'deb [signed-by='$keyring'] $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian')
[ -n "$sources" ] || { echo "apt knows no index of Debian's yet: apt-get update" >&2; exit 1; }
without=() && for path in 'doc/*' 'man/*' 'locale/*'; do without+=(--dpkgopt="path-exclude=/usr/share/$path"); done
mmdebstrap --quiet --mode=root --variant=apt --architectures="$1" --aptopt='Acquire::Retries "5"' \
    --include=python3,python3-venv,kmod,libudev1 "${without[@]}" --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/var/cache/debconf/*-old "$1"/var/log/*' \
    "$codename" "$2" - <<< "$sources"
