#!/usr/bin/env bash
# Makes a release's files in dist/: the wheel, built from a clean export of HEAD, its lock, the sources with all manifests,
# and checksums. Publishes and signs nothing.
# tools/release.sh PYTHON [--rehearse]: PYTHON makes the throw-away environments; a rehearsal takes an unfinished changelog.
set -euo pipefail
python=$(realpath --no-symlinks "$1") rehearse=${2:-}
cd "$(dirname "$0")/.."
version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
scratch=$(mktemp --directory)
trap 'rm -rf "$scratch"' EXIT

refuse() {
    echo "No release of $version: $*" >&2
    [ "$rehearse" = --rehearse ] || exit 1
    echo "(A rehearsal goes on.)" >&2
}

[ -z "$(git status --porcelain)" ] || refuse "the tree has changes that HEAD has not; commit or stash them."
grep -q "^## $version\( \|$\)" CHANGELOG.md || refuse "CHANGELOG.md has no section '## $version'; name its section Unreleased so."
[ -z "$(git tag --list "v$version")" ] || refuse "the tag v$version is there already; raise the version in pyproject.toml."
"$python" -m tools.versions # every file that names a version names this one

# Two builds in two places must be the same, byte for byte: whoever has the sources can then check the wheel.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
"$python" -m venv "$scratch/build"
pip=("$scratch/build/bin/python" -m pip --quiet --quiet --disable-pip-version-check)
"${pip[@]}" install --require-hashes --only-binary :all: --requirement requirements/build.txt
for place in one another; do
    mkdir -p "$scratch/$place/sources"
    git archive HEAD | tar --extract --directory "$scratch/$place/sources"
    "${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$scratch/$place/dist" "$scratch/$place/sources"
done
wheel=fairlead-$version-py3-none-any.whl
cmp "$scratch/one/dist/$wheel" "$scratch/another/dist/$wheel" || { echo "Two builds of $wheel differ." >&2; exit 1; }
rm -rf "$scratch/another"
# From here on there are no sources: the wheel and the lock are all that a node gets.
"$scratch/one/sources/tests/wheel/check.sh" "$python" "$scratch/one/dist/$wheel" "$scratch/one/sources"

rm -rf dist
mkdir dist
cp "$scratch/one/dist/$wheel" requirements/run.txt dist/
git archive --prefix="fairlead-$version/" HEAD | gzip --no-name --best > "dist/fairlead-$version.tar.gz"
(cd dist && sha256sum -- * > SHA256SUMS)
cat dist/SHA256SUMS
cat << END
dist/ has release $version of $(git rev-parse --short HEAD). Nothing is signed or published. What is left to a person:
  git tag --sign v$version && git push origin v$version
  gpg --armor --detach-sign dist/SHA256SUMS
END
