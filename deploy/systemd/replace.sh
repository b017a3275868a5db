#!/bin/sh
# Replaces the running service by what is installed now, program, unit and drop-ins: the node's devices are never away.
# A second service of the new unit, fairlead-next, takes over from the first, and hands back to it once that is the new one.
# It may be cut off anywhere, and run again. Exit codes: 0 done, 1 not done, and the node is served as before.
# UNITS says where units are that last until the next boot, for the tests.
set -eu
next=${UNITS:-/run/systemd/system}/fairlead-next.service

systemctl daemon-reload
if systemctl --quiet is-active fairlead-next; then # this was cut off before
    systemctl start fairlead
    systemctl stop fairlead-next
fi
if ! systemctl --quiet is-active fairlead; then
    echo "The service fairlead does not run, so that there is nothing to replace: systemctl start fairlead" >&2
    exit 1
fi
systemctl --no-pager cat fairlead > "$next.new" # with all of the node's own drop-ins, in their order
mv "$next.new" "$next"
systemctl daemon-reload
if ! systemctl start fairlead-next; then
    run=$(systemctl show --property=InvocationID --value fairlead-next)
    journalctl --sync || true
    journalctl --quiet --lines=20 --output=cat "_SYSTEMD_INVOCATION_ID=$run" >&2 || true # every mistake of a configuration
    systemctl stop fairlead-next || true # systemd would try it again
    systemctl reset-failed fairlead-next || true
    rm "$next"
    echo "What is installed now does not start, and what ran before serves this node on, until it ends or the node" \
        "reboots. Mend what is wrong, and run $0 again." >&2
    exit 1
fi
if ! systemctl restart fairlead; then
    echo "The service fairlead-next serves the node now, until fairlead starts: journalctl --unit fairlead" >&2
    exit 1
fi
systemctl stop fairlead-next
rm "$next"
