//! Errors as the caller gets them: an errno and its subject.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use serde::Serialize;

/// The cause of a failed step.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: Errno,
    /// The system call, where the path alone would not say what failed.
    pub(crate) call: Option<&'static str>,
    /// What to say instead of the errno's own text.
    pub(crate) text: Option<String>,
    pub(crate) path: Option<PathBuf>,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self { errno, call: None, text: None, path: None }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(number) => Errno::from_raw_os_error(number).into(),
            None => Self { text: Some(error.to_string()), ..Errno::IO.into() },
        }
    }
}

/// Adds the subject to an error.
pub(crate) trait Context<T> {
    /// Adds the path to an error.
    fn at(self, path: impl AsRef<Path>) -> Result<T>;
    /// Names the system call.
    fn calling(self, name: &'static str) -> Result<T>;
}

impl<T, E: Into<Failure>> Context<T> for std::result::Result<T, E> {
    fn at(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| Failure { path: Some(path.as_ref().to_owned()), ..error.into() })
    }

    fn calling(self, name: &'static str) -> Result<T> {
        self.map_err(|error| Failure { call: Some(name), ..error.into() })
    }
}

/// The message about a step that failed. The caller recognizes it by its first field.
#[derive(Serialize)]
struct Message<'a> {
    failed: &'a str,
    errno: i32,
    call: Option<&'static str>,
    text: Option<&'a str>,
    path: Option<String>,
}

/// Writes the message for the caller.
pub(crate) fn message(step: &str, failure: &Failure) -> Vec<u8> {
    let path = failure.path.as_ref().map(|path| {
        path.as_os_str().as_bytes().iter().copied().map(char::from).collect::<String>()
    });
    let text = failure.text.as_deref();
    let message = Message {
        failed: step,
        errno: failure.errno.raw_os_error(),
        call: failure.call,
        text,
        path,
    };
    serde_json::to_vec(&message).expect("a struct of text and numbers is always JSON")
}
