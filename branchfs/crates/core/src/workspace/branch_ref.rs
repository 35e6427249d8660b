//! References to branches in requests, and valid branch names.

use std::ffi::OsStr;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Branches;
use super::{Branch, BranchId};
use crate::error::Error;

/// A branch as a request names it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "a branch is named by its name (a string) or its id (a number)")]
pub enum BranchRef {
    /// By number; 0 is main.
    Id(BranchId),
    /// By name; "main" is main.
    Name(String),
}

/// Writes the name in quotation marks, or the number.
impl fmt::Display for BranchRef {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(formatter, "{id}"),
            Self::Name(name) => write!(formatter, "{name:?}"),
        }
    }
}

impl BranchRef {
    /// The branch, or `None` for main.
    pub(super) fn find<'b>(&self, branches: &'b Branches) -> Result<Option<&'b Branch>, Error> {
        match self {
            Self::Id(0) => Ok(None),
            Self::Id(id) => {
                let branch = branches.get(id).ok_or_else(|| Error::NotFound(id.to_string()))?;
                Ok(Some(branch))
            }
            Self::Name(name) => match branches.by_name(name) {
                Some(branch) => Ok(Some(branch)),
                None if name == "main" => Ok(None),
                None => Err(Error::NotFound(name.clone())),
            },
        }
    }
}

/// Checks a name against the rule of the control protocol.
pub(super) fn check_name(name: &OsStr) -> Result<(), Error> {
    const NAME_BYTES_MAX: usize = 254; // `@name` is a file name of at most 255 bytes
    let bytes = name.as_encoded_bytes();
    let reason = if bytes.is_empty() {
        "it is empty"
    } else if bytes == b"." || bytes == b".." {
        "it is the name of a directory itself"
    } else if bytes == b"main" {
        "it is reserved for the root branch"
    } else if bytes.len() > NAME_BYTES_MAX {
        "it is longer than 254 bytes"
    } else if bytes[0] == b'@' {
        "it begins with @"
    } else if bytes.contains(&b'/') {
        "it contains a slash"
    } else if bytes.iter().any(u8::is_ascii_control) {
        "it contains a newline or another control character"
    } else {
        return Ok(());
    };
    Err(Error::Name { name: name.to_os_string(), reason })
}
