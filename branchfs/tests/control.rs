//! The control socket with hostile clients (S13: the control socket is checked).

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Mount, shell, succeed, wait_until};
use serde_json::Value;

/// Far longer than anything here takes on the slowest machine.
const DEADLINE: Duration = Duration::from_secs(60);

fn socket_of(mount: &Mount) -> PathBuf {
    let mut value = [0; 4096];
    let read = rustix::fs::getxattr(mount.mountpoint(), "user.branchfs.control", &mut value[..]);
    PathBuf::from(OsStr::from_bytes(&value[..read.unwrap()]))
}

fn connect(mount: &Mount) -> UnixStream {
    let stream = UnixStream::connect(socket_of(mount)).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

fn reply_of(stream: &UnixStream) -> Value {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

fn ask(mut stream: &UnixStream, request: &[u8]) -> Value {
    stream.write_all(&[request, b"\n"].concat()).unwrap();
    reply_of(stream)
}

#[test]
fn only_the_daemons_user_can_put_a_socket_in_its_place() {
    let mount = Mount::new();
    let directory = fs::metadata(socket_of(&mount).parent().unwrap()).unwrap();
    assert_eq!((directory.uid(), directory.mode() & 0o777), (0, 0o755));
}

#[test]
fn another_user_is_refused_and_the_owner_of_the_base_is_not() {
    let mount = Mount::unmounted(|base| {
        std::os::unix::fs::chown(base, Some(1000), Some(1000)).unwrap();
    });
    fs::set_permissions(mount.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    mount.mount();
    let program = common::program_for_others(mount.directory.path());
    let create = |user: &str, name: &str| {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]);
        command.arg(&program).args(["create", name]).arg(mount.mountpoint()).output().unwrap()
    };
    let refused = common::refusal(&create("65534", "theirs"));
    assert!(refused.contains("user 65534 is not allowed to control this workspace"), "{refused}");
    succeed(&create("1000", "own"));
    let list = mount.run(&["list"], &[]);
    assert!(!String::from_utf8(list.stdout).unwrap().contains("theirs"));
}

#[test]
fn a_commit_that_would_take_nothing_says_what_there_is() {
    let mount = Mount::new();
    shell(&mount.create("work"), "echo > first; echo > second");
    let request = br#"{"v":1,"verb":"commit","branch":"work","exclude":["*"]}"#;
    let error = &ask(&connect(&mount), request)["error"];
    assert_eq!(error["kind"], "usage");
    assert!(error["hint"].as_str().unwrap().contains("the first is 'first'"), "{error}");
    assert_eq!(mount.ask("list")["branches"][0]["state"], "live");
}

#[test]
fn broken_requests_are_answered_as_such_and_change_nothing() {
    let mount = Mount::new();
    let stream = connect(&mount);
    let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    let long = format!(r#"{{"v":1,"verb":"create","name":"{}"}}"#, "x".repeat(500_000));
    let requests: [(&[u8], &str); 20] = [
        (b"", "usage"),
        (b"\0", "usage"),
        (b"\xff\xfe", "usage"),
        (b"null", "usage"),
        (b"[]", "usage"),
        (b"{}", "usage"),
        (b"{\"v\":1", "usage"),
        (br#"{"v":1}"#, "usage"),
        (br#"{"v":1,"verb":7}"#, "usage"),
        (br#"{"v":2,"verb":"list"}"#, "usage"),
        (br#"{"v":-1,"verb":"list"}"#, "usage"),
        (br#"{"verb":"list"}"#, "usage"),
        (br#"{"v":1,"verb":"no such verb"}"#, "usage"),
        (br#"{"v":1,"verb":"create"}"#, "usage"),
        (br#"{"v":1,"verb":"commit","branch":{}}"#, "usage"),
        (br#"{"v":1,"verb":"commit","branch":-1}"#, "usage"),
        (br#"{"v":1,"verb":"abort","branch":18446744073709551615}"#, "not_found"),
        (br#"{"v":1,"verb":"create","name":"../../etc"}"#, "name"),
        (long.as_bytes(), "name"),
        (&deep, "usage"),
    ];
    for (request, kind) in requests {
        let shown = String::from_utf8_lossy(&request[..request.len().min(60)]).into_owned();
        assert_eq!(ask(&stream, request)["error"]["kind"], kind, "{shown}");
    }
    for verb in ["commit", "abort"] {
        let main = ask(&stream, format!(r#"{{"v":1,"verb":"{verb}","branch":"main"}}"#).as_bytes());
        assert_eq!(main["error"]["kind"], "usage");
    }
    let list = ask(&stream, br#"{"v":1,"verb":"list"}"#);
    assert_eq!(list["ok"]["branches"], serde_json::json!([]), "the same connection goes on");
}

#[test]
fn a_line_without_end_is_cut_off() {
    let mount = Mount::new();
    let stream = connect(&mount);
    let sender = stream.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        let _ = (&sender).write_all(&vec![b'x'; 4 << 20]); // fails once the daemon has had enough
    });
    let reply = reply_of(&stream);
    assert!(reply["error"]["message"].as_str().unwrap().contains("1048576"), "{reply}");
    sending.join().unwrap();
    succeed(&mount.run(&["list"], &[]));
}

/// A connection with a request that has begun and goes on for at most 10 s.
fn connect_with_half_a_line(mount: &Mount) -> UnixStream {
    let mut stream = connect(mount);
    stream.write_all(b"{\"v\":1,").unwrap();
    stream
}

const LIST: &[u8] = br#"{"v":1,"verb":"list"}"#;

#[test]
fn requests_that_stall_block_no_other_and_are_bounded() {
    let mount = Mount::new();
    let mut half: Vec<_> = (0..100).map(|_| connect_with_half_a_line(&mount)).collect();
    mount.create("meanwhile");
    mount.commit("meanwhile");
    let refused = loop {
        assert!(half.len() < 2000, "there is no limit");
        half.extend((0..20).map(|_| connect_with_half_a_line(&mount)));
        let reply = ask(&connect(&mount), LIST);
        if reply.get("error").is_some() {
            break reply;
        }
    };
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("user 0 has 512 connections with a request"), "{refused}");
    drop(half);
    let start = Instant::now();
    while !mount.run(&["list"], &[]).status.success() {
        assert!(start.elapsed() < DEADLINE, "places are given back when peers hang up");
    }
}

#[test]
fn idle_connections_never_lock_out_a_client_and_are_bounded() {
    let mount = Mount::new();
    let working = connect(&mount);
    let mut idle = Vec::new();
    for number in 0..600 {
        let peer = connect(&mount);
        if number % 2 == 0 {
            assert!(ask(&peer, LIST)["ok"].is_object()); // the others never say a word
        }
        idle.push(peer);
        if number % 100 == 99 {
            assert!(ask(&working, LIST)["ok"].is_object());
            mount.create("meanwhile");
            mount.commit("meanwhile");
        }
    }
    let is_open = |mut peer: &UnixStream| peer.write_all(b"\n").is_ok();
    wait_until("no more than the limit are open", || {
        let open = threads(&mount, "control").len();
        (500..=515).contains(&open)
    });
    assert!(!is_open(&idle[0]), "the one that was idle longest has made room");
    assert!(is_open(&idle[599]));
    assert!(ask(&working, LIST)["ok"].is_object());
}

/// What the kernel says of each thread of the daemon that has this name: the fields of `/proc/PID/task/TID/stat` after it.
fn threads(mount: &Mount, name: &str) -> Vec<Vec<String>> {
    let tasks = fs::read_dir(format!("/proc/{}/task", mount.daemon())).unwrap();
    let stats = tasks.flat_map(|task| fs::read_to_string(task.unwrap().path().join("stat"))); // some end meanwhile
    let fields = |stat: String| {
        let (_, after) = stat.split_once(&format!("({name}) "))?;
        Some(after.split(' ').map(str::to_owned).collect())
    };
    stats.filter_map(fields).collect()
}

#[test]
fn threads_wait_for_connections_and_are_as_many_afterwards_as_before() {
    let mount = Mount::new();
    let (waiting, most) = (threads(&mount, "control").len(), 20);
    assert_eq!(waiting, 2);
    for _ in 0..2 {
        let peers: Vec<_> = (0..most).map(|_| connect(&mount)).collect();
        for peer in &peers {
            assert!(ask(peer, br#"{"v":1,"verb":"list"}"#)["ok"].is_object());
        }
        assert!(threads(&mount, "control").len() > most); // one more can come
        drop(peers);
        wait_until("only those that wait are left", || threads(&mount, "control").len() == waiting);
    }
}

#[test]
fn background_work_yields_to_requests() {
    const NICE: usize = 16; // of the fields after the name
    let mount = Mount::new();
    let nice_of = |name| -> Vec<String> {
        threads(&mount, name).into_iter().map(|fields| fields[NICE].clone()).collect()
    };
    let usual: i32 = nice_of("control")[0].parse().unwrap();
    mount.create("b");
    mount.abort("b");
    wait_until("the trash is emptied", || nice_of("background").len() == 1);
    wait_until("by a thread that is nice", || nice_of("background") == [usual.max(10).to_string()]);
    assert_eq!(nice_of("request-1"), [usual.to_string()]);
}

#[test]
fn clients_that_never_read_block_no_other_client() {
    let mount = Mount::new();
    mount.create("branch");
    let deaf = connect(&mount);
    deaf.set_nonblocking(true).unwrap();
    // Until the daemon, whose replies nobody takes, takes no more.
    let mut sent = 0;
    let start = Instant::now();
    while start.elapsed() < DEADLINE {
        match (&deaf).write(b"{\"v\":1,\"verb\":\"list\"}\n") {
            Ok(count) => sent += count,
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                break;
            }
        }
    }
    assert!(sent > 0);
    succeed(&mount.run(&["list"], &[]));
    mount.commit("branch");
}

#[test]
fn a_commit_that_fails_says_at_which_path_and_in_which_step() {
    let mount = Mount::over(|base| shell(base, "echo old > file; echo old > other"));
    shell(&mount.create("branch"), "echo new > file; echo new > other");
    shell(&mount.base(), "chattr +i other");
    let mut stream = UnixStream::connect(mount.control_socket()).unwrap();
    writeln!(stream, r#"{{"v":1,"verb":"commit","branch":"branch","force":true}}"#).unwrap();
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    shell(&mount.base(), "chattr -i other; test \"$(cat file other)\" = $'old\\nold'");
    let error = &serde_json::from_str::<serde_json::Value>(&line).unwrap()["error"];
    assert_eq!(
        (&error["kind"], &error["path"], &error["step"]),
        (&"io".into(), &"other".into(), &"exchange".into()),
        "{error}"
    );
    succeed(&mount.run(&["commit", "--force", "branch"], &[])); // the flags are a change by others
    shell(&mount.base(), "test \"$(cat file other)\" = $'new\\nnew'");
    // An error that is about no path has neither.
    writeln!(stream, r#"{{"v":1,"verb":"commit","branch":"branch"}}"#).unwrap();
    line.clear();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    let error = &serde_json::from_str::<serde_json::Value>(&line).unwrap()["error"];
    assert!(error["path"].is_null() && error["step"].is_null(), "{error}");
}
