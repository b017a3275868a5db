#!/bin/sh
# Makes this image a service of the node that it runs on: install.sh install | follow | remove.
#   install  copies the image's files and the unit; where other files serve, the new ones take over without a gap
#   follow   keeps the service's configuration as the ConfigMap has it, until it is told to end
#   remove   stops the service and removes all but its state
# Each may be repeated, and cut off anywhere. HOST, IMAGE and CONFIG say where things are, for the tests.
set -eu
host=${HOST:-/host}
image=${IMAGE:-}
config=${CONFIG:-/etc/fairlead/config.toml}
share=$image/opt/fairlead/share/fairlead
trees=/opt/fairlead # on the host: a tree of each image, and which one serves
units=/etc/systemd/system
next=/run/systemd/system/fairlead-next # until the next boot

systemctl() { chroot "$host" systemctl "$@"; }

# Writes a file of the host from stdin, whole or not at all.
put() {
    mkdir -p "${1%/*}"
    cat > "$1.new"
    mv "$1.new" "$1"
}

# Writes the unit of a tree.
unit() {
    put "$host$units/fairlead.service" < "$share/fairlead.service"
    put "$host$units/fairlead.service.d/hardware.conf" < "$share/fairlead.service.d/hardware.conf"
    sed "s|TREE|$trees/$1|" "$share/image.conf" | put "$host$units/fairlead.service.d/image.conf"
}

installed() { [ -e "$host$units/fairlead.service.d/image.conf" ]; }

configure() {
    cmp -s "$config" "$host/etc/fairlead/config.toml" || put "$host/etc/fairlead/config.toml" < "$config"
}

# Has a second service of the new unit take over from the first, and hand back to it once that runs the new tree, too.
swap() {
    mkdir -p "$host$next.service.d"
    cp "$host$units/fairlead.service" "$host$next.service"
    cp "$host$units/fairlead.service.d"/*.conf "$host$next.service.d" # the node's own drop-ins, too
    systemctl daemon-reload
    systemctl start fairlead-next
    systemctl restart fairlead
    systemctl stop fairlead-next
    rm -r "$host$next.service" "$host$next.service.d"
    systemctl daemon-reload
}

install() {
    for other in "$trees/bin" /usr/lib/fairlead /usr/local/lib/fairlead; do
        [ -e "$host$other" ] || continue
        echo "$other is on the node: Fairlead is installed there without this installer. Remove it first." >&2
        exit 1
    done
    tree=$(cat "$share/tree")
    if [ ! -d "$host$trees/$tree" ]; then
        rm -rf "$host$trees/new"
        mkdir -p "$host$trees/new"
        for part in "$image"/*; do
            case ${part##*/} in # "host" is the node itself
            host | dev | proc | run | sys | tmp) mkdir "$host$trees/new/${part##*/}" ;;
            *) cp -ax "$part" "$host$trees/new" ;;
            esac
        done
        sync -f "$host$trees/new" # a name for what is whole, also where the power fails
        mv "$host$trees/new" "$host$trees/$tree"
    fi
    configure
    unit "$tree"
    systemctl daemon-reload
    systemctl enable fairlead
    if systemctl is-active --quiet fairlead && [ "$(readlink "$host$trees/serving")" != "$tree" ]; then
        swap
    fi
    systemctl start fairlead
    ln -sfn "$tree" "$host$trees/serving"
    for other in "$host$trees"/*; do
        case ${other##*/} in "$tree" | serving) ;; *) rm -rf --one-file-system "$other" ;; esac
    done
}

follow() {
    trap 'exit 0' TERM
    while :; do
        ! installed || configure
        sleep 10 & wait $!
    done
}

remove() {
    installed || return 0
    [ ! -e "$host$next.service" ] || systemctl stop fairlead-next
    systemctl disable --now fairlead
    for name in "$next" "$units/fairlead"; do
        rm -rf "$host$name.service" "$host$name.service.d"
    done
    rm -rf --one-file-system "$host$trees" "$host/etc/fairlead/config.toml"
    systemctl daemon-reload
}

case ${1:-} in
install | follow | remove) "$1" ;;
*) echo "install.sh install | follow | remove" >&2; exit 2 ;;
esac
