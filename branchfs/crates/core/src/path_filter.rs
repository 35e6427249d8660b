//! Which paths of a branch a commit takes: globs as `.gitignore` has them, and paths that are skipped.
//!
//! A pattern without a slash means a name in any directory; with one, a path from the workspace's root. `*` and `?` stop
//! at slashes, `**` does not. A pattern that matches a directory means all that is in it.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::error::Error;

/// The paths to include; by default all.
#[derive(Clone, Debug, Default)]
pub struct PathFilter {
    only: Option<Patterns>,
    exclude: Option<Patterns>,
    skipped: BTreeSet<PathBuf>,
}

/// Patterns, and their text.
#[derive(Clone, Debug)]
struct Patterns {
    globs: GlobSet,
    text: String,
}

impl PathFilter {
    /// Includes paths that match one of `only` (all, if it is empty) and none of `exclude`.
    ///
    /// # Errors
    /// `Usage` for an invalid pattern.
    pub fn new(only: &[String], exclude: &[String]) -> Result<Self, Error> {
        let read = |patterns: &[String]| match patterns {
            [] => Ok(None),
            patterns => {
                let globs = glob_set(patterns)?;
                Ok(Some(Patterns { globs, text: patterns.join(" ") }))
            }
        };
        Ok(Self { only: read(only)?, exclude: read(exclude)?, skipped: BTreeSet::new() })
    }

    /// Excludes these paths, too, and everything below them. Returns whether one of them was included before.
    pub(crate) fn skip(&mut self, paths: impl IntoIterator<Item = PathBuf>) -> bool {
        let before = self.skipped.len();
        self.skipped.extend(paths);
        self.skipped.len() > before
    }

    /// All paths that were given to [`Self::skip`].
    pub(crate) fn skipped(&self) -> &BTreeSet<PathBuf> {
        &self.skipped
    }

    /// Whether paths were given to [`Self::skip`].
    pub(crate) fn skips_any(&self) -> bool {
        !self.skipped.is_empty()
    }

    /// Whether nothing is excluded.
    pub(crate) fn is_all(&self) -> bool {
        self.only.is_none() && self.exclude.is_none() && self.skipped.is_empty()
    }

    /// Whether the object at `path` is included. Says nothing about what is below it.
    pub fn includes(&self, path: &Path) -> bool {
        let matches = |patterns: &Patterns| {
            path.ancestors()
                .take_while(|part| !part.as_os_str().is_empty())
                .any(|part| patterns.globs.is_match(part))
        };
        self.only.as_ref().is_none_or(matches)
            && !self.exclude.as_ref().is_some_and(matches)
            && !path.ancestors().any(|part| self.skipped.contains(part))
    }

    /// Whether a skipped path is `path`, above it or below it.
    pub(crate) fn overlaps_skipped(&self, path: &Path) -> bool {
        self.skipped.iter().any(|skipped| skipped.starts_with(path) || path.starts_with(skipped))
    }
}

/// The patterns as text; empty if there are none.
impl fmt::Display for PathFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(only) = &self.only {
            write!(f, "matches '{}'", only.text)?;
        }
        let and = if self.only.is_some() { " and " } else { "" };
        match &self.exclude {
            Some(exclude) => write!(f, "{and}is outside '{}'", exclude.text),
            None => Ok(()),
        }
    }
}

fn glob_set(patterns: &[String]) -> Result<GlobSet, Error> {
    let refused = |pattern: &str, reason: String| {
        Error::Usage(format!("{pattern:?} is not a pattern for paths: {reason}"))
    };
    let mut globs = GlobSetBuilder::new();
    for pattern in patterns {
        let trimmed = pattern.strip_suffix('/').unwrap_or(pattern);
        let anchored = match trimmed.strip_prefix('/') {
            Some(rest) => rest.to_owned(),
            None if trimmed.contains('/') => trimmed.to_owned(),
            None => format!("**/{trimmed}"),
        };
        if trimmed.trim_matches('/').is_empty() {
            return Err(refused(pattern, "it names nothing".to_owned()));
        }
        let glob = GlobBuilder::new(&anchored)
            .literal_separator(true)
            .backslash_escape(true)
            .build()
            .map_err(|error| refused(pattern, error.kind().to_string()))?;
        globs.add(glob);
    }
    globs.build().map_err(|error| refused(&patterns.join(" "), error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_they_mean_to_git() {
        let cases = [
            ("*.py", "a.py", true),
            ("*.py", "deep/er/a.py", true),
            ("*.py", "a.pyc", false),
            ("src", "src/deep/file", true),
            ("src", "other/src/file", true),
            ("/src", "other/src/file", false),
            ("src/", "src/file", true),
            ("src/*.py", "src/a.py", true),
            ("src/*.py", "src/deep/a.py", false),
            ("src/**/*.py", "src/deep/a.py", true),
            ("docs/**", "docs/a/b", true),
            ("a?c", "abc", true),
            ("[ab]", "b", true),
            ("\\*", "*", true),
            ("\\*", "x", false),
        ];
        for (pattern, path, wanted) in cases {
            let selection = PathFilter::new(&[pattern.to_owned()], &[]).unwrap();
            assert_eq!(selection.includes(Path::new(path)), wanted, "{pattern} and {path}");
            let selection = PathFilter::new(&[], &[pattern.to_owned()]).unwrap();
            assert_eq!(selection.includes(Path::new(path)), !wanted, "not {pattern} and {path}");
        }
        for pattern in ["", "/", "[", "a{b"] {
            PathFilter::new(&[pattern.to_owned()], &[]).unwrap_err();
        }
    }
}
