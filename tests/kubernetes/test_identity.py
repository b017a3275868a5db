from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.kubernetes.identity import read, service_account
from agent.runtime.errors import FairleadError

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def kubeconfig(file: Path, user: dict[str, Any], cluster: dict[str, Any] | None = None, **others: Any) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster or {"server": "https://api.example:6443/"}}],
        "users": [{"name": "u", "user": user}, {"name": "other", "user": {"exec": {"command": "aws"}}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
        "preferences": {},
    } | others
    file.write_text(yaml.safe_dump(document))
    return file


def test_a_pod_is_who_its_service_account_is(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    (tmp_path / "ca.crt").write_text("CA")
    identity = service_account(IN_A_POD, tmp_path)
    assert (identity.server, identity.token, identity.authority) == ("https://10.0.0.1:443", "abc", b"CA")
    assert (
        service_account(IN_A_POD | {"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path).server == "https://[fd00::1]:443"
    )
    assert "abc" not in repr(identity)


def test_outside_of_a_pod_a_kubeconfig_must_be_named() -> None:
    with pytest.raises(FairleadError, match=r"name a kubeconfig in \[kubernetes\], and in \[dra\] for"):
        read(None, {})


def test_a_pod_without_a_token_is_told_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FairleadError, match=r"token cannot be read: No such file"):
        service_account(IN_A_POD, tmp_path)


def test_the_kubelets_own_file_names_its_certificate_in_another_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "pki").mkdir()
    (tmp_path / "pki/client.pem").write_text("PEM")
    authority = base64.b64encode(b"CA").decode()
    file = kubeconfig(
        tmp_path / "kubelet.conf",
        {"client-certificate": "pki/client.pem", "client-key": str(tmp_path / "pki/client.pem")},
        {"server": "https://api.example:6443", "certificate-authority-data": authority},
    )
    identity = read(file)
    assert (identity.server, identity.authority) == ("https://api.example:6443", b"CA")
    assert (identity.certificate, identity.key, identity.token) == (b"PEM", b"PEM", "")
    assert identity.is_verified


def test_a_token_may_stand_in_a_file_of_its_own_and_is_read_anew_each_time(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("old")
    file = kubeconfig(tmp_path / "config", {"tokenFile": "token"})
    assert read(file).token == "old"
    (tmp_path / "token").write_text("new")
    assert read(file).token == "new"


@pytest.mark.parametrize(
    ("user", "others", "why"),
    [
        ({"exec": {"command": "aws"}}, {}, "neither a token nor a client certificate for 'u'; exec is not supported"),
        ({"token": "t"}, {"current-context": "y"}, "has no context 'y'"),
        ({"token": "t"}, {"current-context": ""}, "names no context"),
        ({"token": "t"}, {"clusters": []}, "has no cluster 'c'"),
        ({"token": "t"}, {"clusters": [{"name": "c", "cluster": {}}]}, "names no server"),
        ({"token": 7}, {}, "is no kubeconfig: Expected `str`, got `int`"),
        ({"client-certificate-data": "%"}, {}, "is no kubeconfig"),
        ({"client-certificate": "/nowhere"}, {}, "/nowhere cannot be read"),
    ],
)
def test_what_is_wrong_with_a_kubeconfig_is_said(
    tmp_path: Path, user: dict[str, Any], others: dict[str, Any], why: str
) -> None:
    with pytest.raises(FairleadError) as error:
        read(kubeconfig(tmp_path / "config", user, **others))
    assert why in error.value.sentence


@pytest.mark.parametrize("text", ["[", "7", "a: &a [*a]", "\x00", "clusters: 1"])
def test_what_is_no_kubeconfig_at_all_is_said_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(FairleadError, match="config") as error:
        read(file)
    assert "\n" not in error.value.sentence


def test_a_certificate_that_is_none_is_said(tmp_path: Path) -> None:
    data = base64.b64encode(b"nonsense").decode()
    file = kubeconfig(tmp_path / "config", {"client-certificate-data": data, "client-key-data": data})
    with pytest.raises(FairleadError, match=r"a certificate or key for https://api.example:6443 cannot be used"):
        read(file).tls()
