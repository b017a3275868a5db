# For scripts that fetch packages with state of apt's own, in a cache outside of the clone. One script has it at a time.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/fairlead
mkdir -p "$cache"
exec 9> "$cache/lock"
flock 9

# apt-get or apt-cache with lists and packages of its own in the cache's NAME: apt NAME get|cache COMMAND...
apt() {
    local state=$cache/$1 tool=apt-$2
    shift 2
    mkdir -p "$state/lists/partial" "$state/archives/partial"
    "$tool" -qq -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none -o Acquire::Retries=5 \
        -o Dir::State::Lists="$state/lists" -o Dir::Cache="$state" -o Dir::Cache::Archives="$state/archives" "$@"
}

# Has the packages of an apt-get command (install, download) in the cache and prints their paths: fetch NAME COMMAND...
# apt believes a cached package that is as long as it should be; here each has to have the checksum of the signed index.
fetch() {
    local name=$1 archives=$cache/$1/archives uri file size hash
    shift
    local wanted=()
    while read -r uri file size hash; do
        wanted+=("${hash#SHA256:}  $file")
    done < <(cd "$cache" && apt "$name" get -o Acquire::ForceHash=sha256 -o Dir::Cache::Archives="$cache/none" --print-uris "$@")
    for file in "${wanted[@]}"; do
        (cd "$archives" && sha256sum --status --check <<< "$file" 2> /dev/null) || rm -f "$archives/${file#*  }"
    done
    (cd "$archives" && apt "$name" get --download-only "$@" > /dev/null)
    for file in "${wanted[@]}"; do
        (cd "$archives" && sha256sum --status --check <<< "$file") || { echo "$file has another checksum" >&2; return 1; }
        echo "$archives/${file#*  }"
    done
}
