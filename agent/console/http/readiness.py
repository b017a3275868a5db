"""Is the node served: has the kubelet every configured resource, with an open stream? Pure."""

from __future__ import annotations

from agent.console.views import Status


def unready(status: Status) -> list[str]:
    """One sentence for each resource that the kubelet has not; what retires is not missed, nor what another serves yet."""
    return [
        f"{resource.name} is not registered: {resource.complaint or status.kubelet.waiting_for or 'its turn comes'}"
        if not resource.registered
        else f"{resource.name} is registered, but the kubelet has no stream open: {resource.complaint or 'it may come'}"
        for resource in status.resources
        if resource.backend and not resource.served and not status.standing_by
    ]
