"""Reads where Kubernetes' API server is and who we are to it: a kubeconfig file, or the pod's service account.

A kubeconfig's form is that of k8s.io/client-go/tools/clientcmd/api/v1; programs that hand out credentials (`exec`) and
passwords are not supported. Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from agent.runtime.errors import FairleadError, words
from backends.interface.decoding import converted
from backends.linux import files

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its token and the cluster's CA ("Accessing the Kubernetes API from a Pod", kubernetes.io)."""

_MOST_BYTES: Final = 1 << 20  # of a kubeconfig, a certificate or a token: the most that a Secret has


class Identity(msgspec.Struct, frozen=True):
    """An API server, and who we are to it."""

    server: str
    """`https://10.0.0.1:6443`"""
    authority: bytes = b""
    """Certificates (PEM) that the server's must come from; empty: those of the system."""
    token: str = ""
    certificate: bytes = b""
    """Ours (PEM), with `key`; empty if we have a token."""
    key: bytes = b""
    is_verified: bool = True
    """Whether the server's certificate is looked at."""

    def __repr__(self) -> str:  # a log must not have the token or the key
        return f"Identity({self.server!r})"

    def tls(self) -> ssl.SSLContext:
        """The TLS context of connections.

        Raises:
            FairleadError: a certificate or the key is none.
        """
        try:
            context = ssl.create_default_context(cadata=self.authority.decode() if self.authority else None)
            # Python 3.13 wants extensions that authorities of older clusters lack (kubernetes-client/python#2394)
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if not self.is_verified:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if self.certificate:
                _load(context, self.certificate + b"\n" + self.key)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise FairleadError(f"a certificate or key for {self.server} cannot be used: {words(error)}") from error
        return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Take our certificate and key, which OpenSSL reads from a file only: one that is in memory and has no name."""
    file = os.memfd_create("kubernetes")
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


def read(kubeconfig: Path | None, environment: Mapping[str, str] = os.environ) -> Identity:
    """The identity that a kubeconfig's current context names; without one, the pod's service account.

    Raises:
        FairleadError: there is none, or it is none that we understand.
    """
    if kubeconfig is None:
        return service_account(environment)
    import yaml  # noqa: PLC0415  # 1 MB that a pod can do without

    try:
        document = yaml.safe_load(_read(kubeconfig))
        return _of(converted(document, _Kubeconfig), kubeconfig.parent)
    except (yaml.YAMLError, msgspec.ValidationError, binascii.Error, UnicodeDecodeError) as error:
        raise FairleadError(f"{kubeconfig} is no kubeconfig: {' '.join(words(error).split())}") from error
    except _NotThereError as error:
        raise FairleadError(f"{kubeconfig} {error}") from error


def service_account(environment: Mapping[str, str], directory: Path = SERVICE_ACCOUNT) -> Identity:
    """The pod's service account; its token is another from time to time.

    Raises:
        FairleadError: this is no pod, or its token is not mounted.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise FairleadError(
            "KUBERNETES_SERVICE_HOST is not set, as it is in every pod; elsewhere, name a kubeconfig in [kubernetes], and in [dra] "
            'for resources with serve = "dra"'
        )
    token, authority = _read(directory / "token").decode(errors="replace").strip(), _read(directory / "ca.crt")
    return Identity(f"https://{f'[{host}]' if ':' in host else host}:{port}", authority, token)


def _read(path: Path) -> bytes:
    try:
        return files.read(path, _MOST_BYTES)
    except OSError as error:
        raise FairleadError(f"{path} cannot be read: {error.strerror}") from error


_Entry = TypeVar("_Entry")


class _NotThereError(Exception):
    """A kubeconfig lacks something; the message goes on where its name ends."""


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False


class _User(msgspec.Struct, rename="kebab"):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""


class _Kubeconfig(msgspec.Struct, rename="kebab"):
    clusters: list[dict[str, Any]] = []
    users: list[dict[str, Any]] = []
    contexts: list[dict[str, Any]] = []
    current_context: str = ""


def _of(config: _Kubeconfig, beside: Path) -> Identity:
    context = _named("context", config.current_context, config.contexts, _Context)
    cluster = _named("cluster", context.cluster, config.clusters, _Cluster)
    user = _named("user", context.user, config.users, _User)
    if not cluster.server:
        raise _NotThereError(f"names no server for the cluster {context.cluster!r}")
    token = user.token or _content("", user.token_file, beside).decode(errors="replace").strip()
    certificate = _content(user.client_certificate_data, user.client_certificate, beside)
    if not (token or certificate):
        raise _NotThereError(
            f"has neither a token nor a client certificate for {context.user!r}; exec is not supported"
        )
    return Identity(
        cluster.server.rstrip("/"),
        _content(cluster.certificate_authority_data, cluster.certificate_authority, beside),
        token,
        certificate,
        _content(user.client_key_data, user.client_key, beside),
        is_verified=not cluster.insecure_skip_tls_verify,
    )


def _named(what: str, name: str, those: Sequence[Mapping[str, Any]], kind: type[_Entry]) -> _Entry:
    for it in those:
        if it.get("name") == name:
            return converted(it.get(what), kind)
    raise _NotThereError(f"has no {what} {name!r}" if name else f"names no {what}")


def _content(data: str, path: str, beside: Path) -> bytes:
    """The data, or what the file has; a relative path begins beside the kubeconfig."""
    return base64.b64decode(data, validate=True) if data else _read(beside / path) if path else b""
