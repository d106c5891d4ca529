"""The ssh configuration, against hand-written files. test_config_table.py compares it with `ssh -G`."""

from __future__ import annotations

import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from distmagic.errors import UsageError
from distmagic.request.hosts import Host
from distmagic.transports.ssh.config import Resolved, file_versions, host_names, resolve
from distmagic.transports.ssh.config_lines import read_lines


@pytest.fixture
def dot_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    me = SimpleNamespace(pw_name="me", pw_dir=str(tmp_path))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: me)
    monkeypatch.setenv("USER", "another")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    folder = tmp_path / ".ssh"
    folder.mkdir()
    return folder


def look_up(dot_ssh: Path, text: str, name: str = "gpu-a") -> Resolved:
    (dot_ssh / "config").write_text(text)
    return resolve(Host(name=name), str(dot_ssh / "config"))


def test_a_host_that_no_file_knows(dot_ssh):
    found = resolve(Host(name="gpu-a"), None)
    assert (found.hostname, found.user, found.port) == ("gpu-a", "me", 22)
    assert found.default_keys
    assert found.identity_files[0] == f"{dot_ssh}/id_ed25519"
    assert found.user_known_hosts[0] == f"{dot_ssh}/known_hosts"
    assert found.global_known_hosts[0] == "/etc/ssh/ssh_known_hosts"
    assert found.warnings == ()


def test_an_alias_in_full(dot_ssh):
    found = look_up(
        dot_ssh,
        """
        # comment
        Host gpu-? !gpu-b
            HostName = %h.cluster.example   # with a comment
            User "jo"
            Port=2222
            IdentityFile ~/.ssh/one
            IdentityFile "%d/.ssh/two of %r"
            IdentitiesOnly yes
            ProxyJump ops@bastion:2200,[fd00::1]:22
            UserKnownHostsFile ~/.ssh/kh1 "%d/.ssh/kh 2"
            GlobalKnownHostsFile /dev/null
            HostKeyAlias cluster
            ConnectTimeout 5
            BatchMode yes
            StrictHostKeyChecking no
            SendEnv LANG
        Host *
            Port 99
            IdentityFile ~/.ssh/three
            ProxyCommand nc %h %p
        """,
    )
    assert (found.hostname, found.user, found.port) == (
        "gpu-a.cluster.example",
        "jo",
        2222,
    )
    assert found.identity_files == (
        f"{dot_ssh}/one",
        f"{dot_ssh}/two of jo",
        f"{dot_ssh}/three",
    )
    assert found.identities_only
    assert not found.default_keys
    assert found.jumps == (
        Host(name="bastion", user="ops", port=2200),
        Host(name="fd00::1", port=22),
    )
    assert found.proxy_command is None  # the jump came first
    assert found.user_known_hosts == (f"{dot_ssh}/kh1", f"{dot_ssh}/kh 2")
    assert found.global_known_hosts == ("/dev/null",)
    assert (found.host_key_alias, found.connect_timeout_s, found.batch_mode) == (
        "cluster",
        5.0,
        True,
    )
    assert found.warnings == ()


def test_what_was_typed_goes_first(dot_ssh):
    (dot_ssh / "config").write_text("Host a\n User jo\n Port 1\n")
    found = resolve(Host(name="a", user="me", port=2), str(dot_ssh / "config"))
    assert (found.user, found.port) == ("me", 2)


def test_the_agent(dot_ssh, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("OTHER", "/run/other")
    assert look_up(dot_ssh, "").identity_agent == "/run/agent"
    assert look_up(dot_ssh, "IdentityAgent none\n").identity_agent is None
    assert look_up(dot_ssh, "IdentityAgent ~/agent\n").identity_agent == str(
        dot_ssh.parent / "agent"
    )
    assert look_up(dot_ssh, "IdentityAgent $OTHER\n").identity_agent == "/run/other"
    assert (
        look_up(dot_ssh, "IdentityAgent ${OTHER}/x\n").identity_agent == "/run/other/x"
    )


def test_include_is_relative_nested_and_ends_with_its_block(dot_ssh):
    (dot_ssh / "d").mkdir()
    (dot_ssh / "d" / "1").write_text("Include d/deep\nHost other\n  User no\n")
    (dot_ssh / "d" / "deep").write_text("Port 1\n")
    (dot_ssh / "inner").write_text("Host gpu-a\n  HostKeyAlias only-if-outer\n")
    text = (
        "Host gpu-a\n  Include d/1 d/nothing*\n  User jo\nHost gpu-b\n  Include inner\n"
    )
    found = look_up(dot_ssh, text)
    assert (found.port, found.user, found.host_key_alias) == (1, "jo", None)


def test_include_from_the_home_of_a_user_who_is_not_there(dot_ssh):
    assert look_up(dot_ssh, "Include ~no-such-user/config\nPort 7\n").port == 7
    assert file_versions(None)


def test_include_of_itself_ends(dot_ssh):
    assert look_up(dot_ssh, "Include config\nPort 7\n").port == 7


@pytest.mark.parametrize(
    ("match", "port"),
    [
        ("all", 7),
        ("host gpu-*", 7),
        ("host other", 22),
        ("originalhost gpu-a,b", 7),
        ("!originalhost gpu-a", 22),
        ("user me", 7),
        ("localuser me host gpu-a", 7),
        ("localuser you", 22),
        ("exec true", 7),
        ('exec "test %h = gpu-a"', 7),
        ("exec false", 22),
        ("!exec false", 7),
        ("canonical", 22),
        ("final", 7),
        ("tagged work", 22),
    ],
)
def test_match(match, port, dot_ssh):
    found = look_up(dot_ssh, f"Match {match}\n  Port 7\n")
    assert (found.port, found.warnings) == (port, ())


@pytest.mark.parametrize("is_there", [True, False])
def test_commands_run_in_the_shell_of_the_user(is_there, dot_ssh, monkeypatch):
    """One that is not there, as a container may name it, is no obstacle."""
    shell = dot_ssh / "shell"
    monkeypatch.setenv("SHELL", str(shell))
    if is_there:
        shell.write_text(
            f'#!/bin/sh\necho "$1 $2" > {dot_ssh}/ran\nexec /bin/sh "$@"\n'
        )
        shell.chmod(0o700)
    found = look_up(dot_ssh, 'Match exec "test %n = gpu-a"\n  Port 7\n')
    assert (found.port, found.warnings) == (7, ())
    assert (dot_ssh / "ran").exists() == is_there
    if is_there:
        assert (dot_ssh / "ran").read_text() == "-c test gpu-a = gpu-a\n"
    monkeypatch.delenv("SHELL")
    assert look_up(dot_ssh, "Match exec false\n  Port 8\n").port == 22


def test_match_final_sees_what_all_files_set(dot_ssh):
    text = "Match final host real\n  Port 7\nHost gpu-a\n  HostName real\n"
    assert look_up(dot_ssh, text).port == 7


@pytest.mark.parametrize(
    "match", ["localnetwork 10.0.0.0/8", "host", "sessiontype shell", "version 9", '"']
)
def test_a_match_line_that_is_not_understood_is_named_and_left_out(
    match, dot_ssh, golden
):
    found = look_up(
        dot_ssh, f"User jo\nMatch {match}\n  Port 7\nHost gpu-a\n  HostKeyAlias after\n"
    )
    assert (found.user, found.port, found.host_key_alias) == ("jo", 22, "after")
    golden(*found.warnings)


def test_lines_without_a_value_are_named(dot_ssh, golden):
    found = look_up(dot_ssh, "User\nMatch\nHost *\nPort 7\n")
    assert found.port == 7
    golden(*found.warnings)


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("PKCS11Provider /usr/lib/opensc-pkcs11.so", "none"),
        ("KnownHostsCommand /usr/bin/known %H", "none"),
        ("ProxyUseFdpass yes", "no"),
        ("BindAddress 10.0.0.9", "none"),
        ("CanonicalizeHostname always", "No"),
    ],
)
def test_what_is_not_followed_is_named(text, harmless, dot_ssh):
    keyword = text.partition(" ")[0]
    (warning,) = look_up(dot_ssh, f"{text}\n").warnings
    assert warning.startswith(f"{keyword} is not followed; ")
    assert warning.endswith("use --ssh-command ssh.")
    assert look_up(dot_ssh, f"{keyword} {harmless}\n").warnings == ()


@pytest.mark.parametrize(
    "text",
    ["Port nonsense\n", "ConnectTimeout soon\n", "Port 70000\n", "ProxyJump a:b:c\n"],
)
def test_values_that_can_not_be_used(text, dot_ssh, golden):
    with golden.raises(UsageError):
        look_up(dot_ssh, text)


def test_names_to_complete(dot_ssh):
    (dot_ssh / "more").write_text("Host deep\n")
    (dot_ssh / "config").write_text(
        "Host a b-* c !d\nInclude more\nMatch host x\nHost *\nHost a e # f\n"
    )
    assert host_names() == ("a", "c", "deep", "e")
    assert host_names(str(dot_ssh / "missing")) == ()


def test_an_edit_of_any_file_is_noticed(dot_ssh):
    config, more = dot_ssh / "config", dot_ssh / "more"
    seen = [file_versions(None)]
    for file, text in (
        (config, "Include more\n"),
        (more, "Host a\n"),
        (more, "Host a b\n"),
        (config, "Host a\n"),
    ):
        file.write_text(text)
        seen.append(file_versions(None))
    assert len(set(seen)) == 5
    assert file_versions(None) == seen[-1]


def test_a_file_is_read_once_and_again_after_an_edit(dot_ssh):
    assert look_up(dot_ssh, "Host gpu-a\n  HostName 10.0.0.1\n").hostname == "10.0.0.1"
    path = str(dot_ssh / "config")
    assert read_lines(path) is read_lines(path)
    assert (
        look_up(dot_ssh, "Host gpu-a\n  HostName 10.0.0.12\n").hostname == "10.0.0.12"
    )
