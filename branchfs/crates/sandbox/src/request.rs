//! The caller's request: one JSON object, read from an inherited descriptor.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Error, Read, Result, Seek};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use serde::de::{Deserialize, Deserializer, Error as _};

/// One command to be started in a sandbox.
#[derive(serde::Deserialize)]
pub(crate) struct Request {
    /// The caller's process id.
    pub(crate) parent: i32,
    /// A connected socket (`SOCK_SEQPACKET`) for messages between init and the caller; see `init`.
    pub(crate) line: RawFd,
    /// A second one for the start of the command; see `child`.
    pub(crate) gate: RawFd,
    /// The descriptors that the command gets: their numbers there, and their numbers here.
    pub(crate) descriptors: Vec<(RawFd, RawFd)>,
    pub(crate) argv: Vec<Bytes>,
    /// The complete environment of the command.
    pub(crate) environment: Vec<(Bytes, Bytes)>,
    /// Uid and gid to become; `None` to stay the caller's user.
    pub(crate) owner: Option<(u32, u32)>,
    /// Uid and gid of the caller.
    pub(crate) user: (u32, u32),
    /// Without a sandbox nothing is hidden or forbidden; `sandbox.view` is the working directory.
    pub(crate) is_sandboxed: bool,
    /// Whether the namespaces need a user namespace around them, because the caller has no privileges.
    pub(crate) is_user_namespace: bool,
    /// Whether the command waits at the gate until the caller has put it under its limits.
    pub(crate) is_limited: bool,
    pub(crate) ignored_signals: Vec<i32>,
    pub(crate) umask: u32,
    /// Descriptor number of the command's terminal, if the command becomes its foreground process.
    pub(crate) terminal: Option<RawFd>,
    /// No other process uses that terminal: the sandbox becomes a session of its own on it.
    pub(crate) is_terminal_own: bool,
    pub(crate) wall_seconds: Option<f64>,
    /// The system call filter: instructions of 8 bytes, as the kernel takes them.
    pub(crate) filter: Bytes,
    /// Soft and hard limit of open files; `None` for those of the caller.
    pub(crate) open_files: Option<(u64, u64)>,
    pub(crate) sandbox: Sandbox,
}

/// The view and the rights of a sandbox. The fields are those of the Python class `Sandbox`.
#[derive(serde::Deserialize)]
pub(crate) struct Sandbox {
    /// The directory to work in.
    pub(crate) view: Bytes,
    /// Where it is seen.
    pub(crate) at: Bytes,
    /// The mount that the view is a branch of.
    pub(crate) mount: Option<Bytes>,
    /// Directories and sockets to hide, wherever else they are mounted.
    pub(crate) private: Vec<Bytes>,
    /// Patterns of paths below `at` that cannot be read.
    pub(crate) hide: Vec<Bytes>,
    /// Whether the command has the caller's network.
    pub(crate) network: bool,
    pub(crate) home: Option<Bytes>,
    /// Other directories to show, read-only, each with the path where it is seen.
    pub(crate) beside: Vec<(Bytes, Bytes)>,
    /// Directories outside of the branch that can be written, each at its own path.
    #[serde(default)]
    pub(crate) caches: Vec<Bytes>,
    /// The directory to start in, relative to `at`.
    #[serde(default)]
    pub(crate) directory: Option<Bytes>,
    /// Paths that stay visible, read-only, below a directory that is hidden or replaced.
    pub(crate) keep: Vec<Bytes>,
}

/// Text of any bytes but NUL. In JSON each byte is the character with its number.
#[derive(Clone, Debug)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Bytes {
    pub(crate) fn path(&self) -> PathBuf {
        OsString::from_vec(self.0.clone()).into()
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(source: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(source)?;
        let bytes = text.chars().map(|character| u8::try_from(u32::from(character)));
        bytes.collect::<std::result::Result<_, _>>().map(Self).map_err(D::Error::custom)
    }
}

impl Sandbox {
    /// The directory to start in, below `top`: the branch, or where it is seen.
    pub(crate) fn start_directory(&self, top: PathBuf) -> PathBuf {
        self.directory.as_ref().map_or(top.clone(), |directory| top.join(directory.path()))
    }
}

impl Request {
    /// Reads the request from its beginning.
    pub(crate) fn read(mut file: File) -> Result<Self> {
        let mut text = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut text)?;
        serde_json::from_slice(&text).map_err(Error::other)
    }
}
