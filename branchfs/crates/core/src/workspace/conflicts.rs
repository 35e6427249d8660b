//! Conflict detection between a branch and the commits since its fork (snapshot, serializable).
//!
//! Both sides are sets of paths. Two paths conflict if they are equal, or if one is a directory that was removed, moved or
//! replaced and the other is below it. A read of a file conflicts with any change of it; a read of a directory's names with
//! added or removed names; a lookup of a missing name with that name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::transaction::{Change, ChangeKind, ObjectKind};
use crate::write_set::Read;

/// The committed change at a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct PathEffect {
    /// The name was added or removed.
    on_names: bool,
    /// Everything below it was added or removed with it.
    on_tree: bool,
    /// A directory was added.
    on_directory: bool,
}

impl PathEffect {
    const REMOVED: Self = Self { on_names: true, on_tree: true, on_directory: false };
}

/// The changes committed since a branch was forked.
#[derive(Debug, Default)]
pub(super) struct CommittedChanges {
    paths: BTreeMap<PathBuf, PathEffect>,
}

impl CommittedChanges {
    pub(super) fn add(&mut self, changes: &[Change]) {
        for change in changes {
            let is_directory = change.kind == ObjectKind::Directory;
            let on_directory = change.change == ChangeKind::Added && is_directory;
            self.put(&change.path, PathEffect { on_directory, ..effect_of(change) });
            if let Some(from) = &change.from {
                self.put(from, PathEffect::REMOVED);
            }
        }
    }

    fn put(&mut self, path: &Path, effect: PathEffect) {
        let known = self.paths.entry(path.to_path_buf()).or_insert(effect);
        known.on_names |= effect.on_names;
        known.on_tree |= effect.on_tree;
        known.on_directory |= effect.on_directory;
    }

    /// The directories that were created where the branch saw nothing.
    pub(super) fn created_directories(&self) -> BTreeSet<PathBuf> {
        let created =
            self.paths.iter().filter(|(_, effect)| effect.on_directory && !effect.on_tree);
        created.map(|(path, _)| path.clone()).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// The paths that both wrote.
    pub(super) fn conflicts_with(
        &self,
        changes: &[Change],
        written: &BTreeSet<PathBuf>,
    ) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        for change in changes {
            self.collect_conflicts(&change.path, effect_of(change).on_tree, &mut found);
            if let Some(from) = &change.from {
                self.collect_conflicts(from, true, &mut found);
            }
        }
        for path in written {
            self.collect_conflicts(path, true, &mut found);
        }
        found
    }

    /// The paths that the branch read and other commits wrote.
    pub(super) fn conflicts_with_reads(&self, reads: &[(PathBuf, Read)]) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        for (path, read) in reads {
            match read {
                Read::Content | Read::NegativeLookup => {
                    self.collect_conflicts(path, false, &mut found)
                }
                Read::Names => {
                    self.meet_above(path, &mut found);
                    if self.paths.get(path).is_some_and(|effect| effect.on_tree) {
                        found.insert(path.clone());
                    }
                    let names = self.changes_below(path).filter(|(below, effect)| {
                        effect.on_names && below.parent() == Some(path.as_path())
                    });
                    found.extend(names.map(|(below, _)| below.clone()));
                }
            }
        }
        found
    }

    /// Adds the paths of other commits that conflict with a path of the branch.
    fn collect_conflicts(&self, path: &Path, with_tree: bool, found: &mut BTreeSet<PathBuf>) {
        if self.paths.contains_key(path) {
            found.insert(path.to_path_buf());
        }
        self.meet_above(path, found);
        if with_tree {
            found.extend(self.changes_below(path).map(|(below, _)| below.clone()));
        }
    }

    fn meet_above(&self, path: &Path, found: &mut BTreeSet<PathBuf>) {
        for above in path.ancestors().skip(1) {
            if self.paths.get(above).is_some_and(|effect| effect.on_tree) {
                found.insert(above.to_path_buf());
            }
        }
    }

    /// Strictly below a path; paths sort by components, so they stand together.
    fn changes_below<'p>(
        &'p self,
        path: &'p Path,
    ) -> impl Iterator<Item = (&'p PathBuf, &'p PathEffect)> {
        self.paths
            .range(path.to_path_buf()..)
            .take_while(move |(below, _)| below.starts_with(path))
            .filter(move |(below, _)| below.as_path() != path)
    }
}

fn effect_of(change: &Change) -> PathEffect {
    match change.change {
        ChangeKind::Added => PathEffect { on_names: true, ..PathEffect::default() },
        ChangeKind::Deleted | ChangeKind::Renamed | ChangeKind::Type => PathEffect::REMOVED,
        // A modified directory was replaced by another one. New attributes are `Metadata`.
        ChangeKind::Modified => {
            PathEffect { on_tree: change.kind == ObjectKind::Directory, ..PathEffect::default() }
        }
        ChangeKind::Metadata => PathEffect::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(path: &str, change: ChangeKind) -> Change {
        Change { path: path.into(), change, from: None, kind: ObjectKind::File }
    }

    fn committed(changes: &[Change]) -> CommittedChanges {
        let mut theirs = CommittedChanges::default();
        theirs.add(changes);
        theirs
    }

    fn names(found: &BTreeSet<PathBuf>) -> Vec<&str> {
        found.iter().map(|path| path.to_str().unwrap()).collect()
    }

    #[test]
    fn writes_meet_at_the_same_path_and_below_what_went() {
        use ChangeKind::{Added, Deleted, Modified};
        let cases: [(Change, Change, &[&str]); 6] = [
            (change("a/f", Modified), change("a/f", Modified), &["a/f"]),
            (change("a/f", Modified), change("a/g", Modified), &[]),
            (change("a", Deleted), change("a/new", Added), &["a"]),
            (change("a/f", Modified), change("a", Deleted), &["a/f"]),
            (change("ab", Modified), change("a", Deleted), &[]),
            (change("a", Added), change("a/f", Added), &[]),
        ];
        for (their, our, wanted) in cases {
            let found = committed(std::slice::from_ref(&their))
                .conflicts_with(std::slice::from_ref(&our), &BTreeSet::new());
            assert_eq!(names(&found), wanted, "{their:?} and {our:?}");
        }
    }

    #[test]
    fn a_directory_that_replaces_another_is_a_write_of_all_below_it() {
        use ChangeKind::{Added, Modified};
        let replaced = Change { kind: ObjectKind::Directory, ..change("d", Modified) };
        let added = change("d/new", Added);
        for (one, other) in [(&replaced, &added), (&added, &replaced)] {
            let found = committed(std::slice::from_ref(one))
                .conflicts_with(std::slice::from_ref(other), &BTreeSet::new());
            assert_eq!(names(&found), [one.path.to_str().unwrap()], "{one:?} and {other:?}");
        }
    }

    #[test]
    fn a_move_is_a_write_at_both_ends() {
        let moved = Change { from: Some("old".into()), ..change("new", ChangeKind::Renamed) };
        let below = change("old/f", ChangeKind::Modified);
        let none = BTreeSet::new();
        let ours = std::slice::from_ref(&below);
        assert_eq!(
            names(&committed(std::slice::from_ref(&moved)).conflicts_with(ours, &none)),
            ["old"]
        );
        let ours = std::slice::from_ref(&moved);
        assert_eq!(
            names(&committed(std::slice::from_ref(&below)).conflicts_with(ours, &none)),
            ["old/f"]
        );
    }

    #[test]
    fn reads_meet_what_they_depend_on() {
        use ChangeKind::{Added, Deleted, Metadata, Modified};
        let cases: [(Change, (&str, Read), &[&str]); 8] = [
            (change("d/f", Modified), ("d/f", Read::Content), &["d/f"]),
            (change("d/f", Modified), ("d", Read::Names), &[]),
            (change("d/f", Added), ("d", Read::Names), &["d/f"]),
            (change("d/e/f", Added), ("d", Read::Names), &[]),
            (change("d", Deleted), ("d/f", Read::Content), &["d"]),
            (change("d/f", Added), ("d/f", Read::NegativeLookup), &["d/f"]),
            (change("d", Metadata), ("d", Read::Names), &[]),
            (change("d", Deleted), ("d", Read::Names), &["d"]),
        ];
        for (their, (path, read), wanted) in cases {
            let found = committed(std::slice::from_ref(&their))
                .conflicts_with_reads(&[(PathBuf::from(path), read)]);
            assert_eq!(names(&found), wanted, "{their:?} and {path} {read:?}");
        }
    }
}
