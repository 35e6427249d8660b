//! Gives up all privileges, for good, before anything of the user's runs.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, Scope,
};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::process::{Gid, Signal, Uid, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use crate::failure::{Context, Failure, Result};
use crate::sys;

/// The newest version of Landlock whose file rights are used, and the first one that restricts signals.
const LANDLOCK_FILES: ABI = ABI::V5;
const LANDLOCK_SCOPES: ABI = ABI::V6;

/// Becomes `owner`, if given, and a process that can never become another user.
///
/// `writable` and `outputs` are for Landlock: the only places and open files to write to.
pub(crate) fn give_up<'a>(
    owner: Option<(u32, u32)>,
    writable: &[PathBuf],
    outputs: impl Iterator<Item = BorrowedFd<'a>>,
    filter: &[u8],
) -> Result<()> {
    // A container's filter refuses all that has to do with keys, also to read them.
    let _ = sys::join_new_keyring();
    clear_ambient_capability_set().calling("prctl")?;
    drop_bounding_set()?;
    if let Some(owner) = owner {
        become_user(owner)?;
    }
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).calling("capset")?;
    // From here on no program gains anything by being started, setuid or not.
    set_no_new_privs(true).calling("prctl")?;
    restrict_files(writable, outputs).map_err(|error| Failure {
        text: Some(format!("Landlock: {error}")),
        ..Errno::IO.into()
    })?;
    seccompiler::apply_filter(&instructions(filter))
        .map_err(|error| Failure { text: Some(format!("seccomp: {error}")), ..Errno::IO.into() })?;
    // Changing the user has cleared it.
    set_parent_process_death_signal(Some(Signal::KILL)).calling("prctl")
}

/// Reads a filter: `struct sock_filter` of linux/filter.h, one after the other.
fn instructions(filter: &[u8]) -> Vec<seccompiler::sock_filter> {
    filter
        .chunks_exact(8)
        .map(|code| seccompiler::sock_filter {
            code: u16::from_ne_bytes([code[0], code[1]]),
            jt: code[2],
            jf: code[3],
            k: u32::from_ne_bytes([code[4], code[5], code[6], code[7]]),
        })
        .collect()
}

/// Becomes another user, without any supplementary group.
pub(crate) fn become_user((uid, gid): (u32, u32)) -> Result<()> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_groups(&[]).calling("setgroups")?;
    set_thread_res_gid(gid, gid, gid).calling("setresgid")?;
    set_thread_res_uid(uid, uid, uid).calling("setresuid")
}

fn drop_bounding_set() -> Result<()> {
    for number in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            Ok(()) => {}
            // That was the last one this kernel has; or it is not allowed, and not needed: no_new_privs makes it
            // ineffective.
            Err(Errno::INVAL | Errno::PERM) => return Ok(()),
            Err(errno) => return Err(errno).calling("prctl"),
        }
    }
    Ok(())
}

/// Restricts access to files a second time. Mounts already restrict what can be reached and written; Landlock repeats
/// that in other terms: reading and executing everywhere, writing only beneath the given places. Since its version 6 it
/// also restricts abstract sockets and signals. Files that are already open as outputs can be opened again
/// (/dev/stdout).
///
/// Does nothing before version 2: version 1 forbids all renames from one directory to another, which programs need.
fn restrict_files<'a>(
    writable: &[PathBuf],
    outputs: impl Iterator<Item = BorrowedFd<'a>>,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let all = AccessFs::from_all(LANDLOCK_FILES);
    let of_files = AccessFs::from_file(LANDLOCK_FILES);
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::SoftRequirement)
        .handle_access(AccessFs::Refer)?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .scope(Scope::from_all(LANDLOCK_SCOPES))?
        .create()?;
    let read = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
    rules = rules.add_rule(PathBeneath::new(PathFd::new("/")?, read))?;
    for path in writable {
        rules = rules.add_rule(PathBeneath::new(PathFd::new(path)?, all))?;
    }
    for output in outputs {
        if FileType::from_raw_mode(fstat(output)?.st_mode) == FileType::RegularFile {
            rules = rules.add_rule(PathBeneath::new(output, of_files))?;
        }
    }
    rules.restrict_self()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::io::ErrorKind::PermissionDenied;
    use std::os::fd::AsFd;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

    use super::*;

    /// Landlock restricts a thread, and each test has its own. The mounts that say the same are not there.
    fn restrict(place: &tempfile::TempDir) -> File {
        let output = File::create(place.path().join("output")).unwrap();
        fs::write(place.path().join("whole"), "whole").unwrap();
        fs::create_dir(place.path().join("in")).unwrap();
        restrict_files(&[place.path().join("in")], [output.as_fd()].into_iter()).unwrap();
        output
    }

    #[test]
    fn landlock_lets_write_in_the_named_places_and_to_outputs_only() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let _output = restrict(&place);
        fs::write(path("in/x"), "x").unwrap();
        fs::create_dir(path("in/directory")).unwrap();
        fs::rename(path("in/x"), path("in/directory/x")).unwrap();
        OpenOptions::new().write(true).truncate(true).open(path("output")).unwrap();
        assert_eq!(fs::read_to_string(path("whole")).unwrap(), "whole");
        let refused = [
            fs::write(path("x"), "x").err(),
            fs::create_dir(path("directory")).err(),
            fs::remove_file(path("whole")).err(),
            OpenOptions::new().append(true).open(path("whole")).err(),
            rustix::fs::open(path("whole"), rustix::fs::OFlags::WRONLY, rustix::fs::Mode::empty())
                .err()
                .map(Into::into),
        ];
        for error in refused {
            assert_eq!(error.expect("it is refused").kind(), PermissionDenied);
        }
    }

    #[test]
    fn landlock_keeps_signals_and_abstract_sockets_inside() {
        let place = tempfile::tempdir().unwrap();
        let name = format!("branchfs-sandbox-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let _listener = UnixListener::bind_addr(&address).unwrap();
        let _output = restrict(&place);
        let refused = UnixStream::connect_addr(&address).unwrap_err();
        assert_eq!(refused.kind(), PermissionDenied);
        let parent = rustix::process::getppid().unwrap();
        assert_eq!(rustix::process::test_kill_process(parent), Err(Errno::PERM));
    }

    #[test]
    fn a_filter_is_read_as_the_kernel_lays_it_out() {
        let code = [0x15, 0, 1, 2, 4, 3, 2, 1];
        let [instruction] = instructions(&code).try_into().unwrap();
        assert_eq!((instruction.code, instruction.jt, instruction.jf), (0x15, 1, 2));
        assert_eq!(instruction.k.to_ne_bytes(), [4, 3, 2, 1]);
    }
}
