//! Detects external changes of the base while the steps of a transaction are executed.
//!
//! The plan describes the base at an earlier time. Directly before a step, the object that it removes from the base is
//! compared with the plan, including the ctime. A change between this comparison and the rename moves into the store with
//! the object, and so do writes through an open descriptor. So after all steps each object is compared again at its new
//! path, including the content of removed directories. A difference rolls the transaction back, which restores the changed
//! object at its path.
//!
//! The steps change the ctime of the objects that they move. The second comparison ignores it, and so does the first one
//! for an object of which another link was moved before. Changes that preserve type, size, mtime, mode and owner are then
//! missed, such as extended attributes that are set during the rename.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;

use rustix::fs::Statx;

use super::step::{Location, Metadata, Step, TransactionRoots, times_of};
use crate::error::Error;
use crate::write_set::Fingerprint;

/// Fingerprints of the objects that leave the base, also of those inside directories, by their locations in the store.
pub(crate) type Displaced = BTreeMap<Location, Fingerprint>;

/// Compares the base with the plan while the steps run.
pub(super) struct Watch<'a> {
    disk: &'a TransactionRoots,
    displaced: &'a Displaced,
    /// Inode numbers of objects whose ctime the steps changed.
    touched: HashSet<u64>,
    /// Inode number of an object whose attributes a step sets in place -> the attributes. Other names of it may be
    /// removed from the base.
    set: HashMap<u64, &'a Metadata>,
    /// Objects that were moved out of the base: path there, location in the store, and their status right before.
    taken: Vec<(&'a Path, &'a Location, Statx)>,
    /// Locations that the steps move something to.
    filled: BTreeSet<&'a Location>,
}

impl<'a> Watch<'a> {
    pub(super) fn new(disk: &'a TransactionRoots, displaced: &'a Displaced) -> Self {
        Self {
            disk,
            displaced,
            touched: HashSet::new(),
            set: HashMap::new(),
            taken: Vec::new(),
            filled: BTreeSet::new(),
        }
    }

    /// Compares the object that the next step removes from the base, or whose attributes it sets, with the plan.
    ///
    /// # Errors
    /// `Conflict` with the path that others changed.
    pub(super) fn before(&mut self, step: &'a Step) -> Result<(), Error> {
        if let Step::Rename { to, .. } | Step::Exchange { one: to, .. } = step {
            self.filled.insert(to);
        }
        let (place, ino, to) = match step {
            Step::Rename { from: place @ Location::Base(_), ino, to, .. } => (place, *ino, to),
            Step::Exchange { other: place @ Location::Base(_), ino_other, one, .. } => {
                (place, *ino_other, one)
            }
            Step::Metadata { path, before: Location::Base(_), ino, new, old } => {
                return self.before_metadata(path, *ino, new, old);
            }
            _ => return Ok(()),
        };
        let stat = self.disk.stat(place)?.filter(|stat| stat.stx_ino == ino);
        let seen = self.displaced.get(to);
        let stat = stat.filter(|stat| seen.is_none_or(|seen| self.is_as_seen(seen, stat)));
        let Some(stat) = stat else { return Err(changed(place.path())) };
        self.touched.insert(ino);
        self.taken.push((place.path(), to, stat));
        Ok(())
    }

    /// Checks that the attributes are those in the plan. An object with several links may have the new ones already.
    fn before_metadata(
        &mut self,
        path: &Location,
        ino: u64,
        new: &'a Metadata,
        old: &Metadata,
    ) -> Result<(), Error> {
        let Some(stat) = self.disk.stat(path)?.filter(|stat| stat.stx_ino == ino) else {
            return Err(changed(path.path()));
        };
        let now = self.disk.metadata(path)?;
        let is_one_of = |same: &dyn Fn(&Metadata) -> bool| same(old) || same(new);
        let is_directory = Fingerprint::of(&stat).is_directory(); // its times change with its entries
        let is_known = is_one_of(&|known| known.mode == now.mode)
            && is_one_of(&|known| (known.uid, known.gid) == (now.uid, now.gid))
            && is_one_of(&|known| known.xattrs == now.xattrs)
            && (is_directory || is_one_of(&|known| known.mtime == now.mtime));
        self.touched.insert(ino);
        self.set.insert(ino, new);
        if is_known { Ok(()) } else { Err(changed(path.path())) }
    }

    fn is_as_seen(&self, seen: &Fingerprint, stat: &Statx) -> bool {
        let now = Fingerprint::of(stat);
        let ctime = if self.touched.contains(&now.ino) { seen.ctime } else { now.ctime };
        let is_set = self.set.get(&now.ino).is_some_and(|set| set.mtime == times_of(stat).1);
        let mtime = if is_set { seen.mtime } else { now.mtime };
        seen.matches(&Fingerprint { ctime, mtime, ..now })
    }

    /// Compares all objects that were removed from the base with their state before the step.
    ///
    /// # Errors
    /// `Conflict` names the path that others changed.
    pub(super) fn after_all(&self) -> Result<(), Error> {
        for (path, place, before) in &self.taken {
            let Some(now) = self.disk.stat(place)? else { continue }; // a later step moved it on
            let attributes = |stat: &Statx| {
                let Fingerprint { kind, ino, size, mtime, .. } = Fingerprint::of(stat);
                let content = (!Fingerprint::of(stat).is_directory()).then_some((size, mtime));
                (kind, ino, content, stat.stx_mode, stat.stx_uid, stat.stx_gid)
            };
            if attributes(before) != attributes(&now) && !self.is_as_set(before, &now) {
                return Err(changed(path));
            }
            if self.displaced.contains_key(place) && Fingerprint::of(&now).is_directory() {
                self.compare_below(path, place)?;
            }
        }
        Ok(())
    }

    /// Whether an object differs from its state before only in attributes that a later step has set.
    fn is_as_set(&self, before: &Statx, now: &Statx) -> bool {
        let Some(set) = self.set.get(&now.stx_ino) else { return false };
        let (then, found) = (Fingerprint::of(before), Fingerprint::of(now));
        let mode = u32::from(now.stx_mode) & 0o7777;
        (then.kind, then.ino, then.size) == (found.kind, found.ino, found.size)
            && (now.stx_mode == before.stx_mode || mode == set.mode)
            && ((now.stx_uid, now.stx_gid) == (before.stx_uid, before.stx_gid)
                || (now.stx_uid, now.stx_gid) == (set.uid, set.gid))
            && (then.mtime == found.mtime || times_of(now).1 == set.mtime)
    }

    /// Compares the content of a removed directory with the plan. Missing names are accepted.
    fn compare_below(&self, path: &Path, place: &Location) -> Result<(), Error> {
        let mut pending = vec![(path.to_path_buf(), place.clone())];
        while let Some((path, place)) = pending.pop() {
            for entry in self.disk.list(&place)? {
                let (path, place) = (path.join(&entry.name), place.join(&entry.name));
                let Some(stat) = self.disk.stat(&place)? else { continue };
                if self.filled.contains(&place) {
                    continue; // compared by itself, where it came from
                }
                let seen = self.displaced.get(&place);
                if !seen.is_some_and(|seen| self.is_as_seen(seen, &stat)) {
                    return Err(changed(&path));
                }
                if Fingerprint::of(&stat).is_directory() {
                    pending.push((path, place));
                }
            }
        }
        Ok(())
    }
}

fn changed(path: &Path) -> Error {
    Error::Conflict {
        message: format!(
            "{} was changed by another process at the same moment; the transaction was rolled back",
            path.display()
        ),
        paths: vec![path.to_path_buf()],
        hint: "look at it, then commit again",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::XattrFlags;

    use super::*;
    use crate::transaction::step::Direction;
    use crate::transaction::step_crash_tests::{Store, decided, without_times};

    type Edit = fn(&Path);

    const EDITS: [(&str, Edit); 5] = [
        ("append", |path| {
            let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
            file.write_all(b" edited").unwrap();
        }),
        ("set the mode", |path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        }),
        ("replace", |path| {
            let draft = path.with_extension("draft");
            fs::write(&draft, "edited").unwrap();
            fs::rename(&draft, path).unwrap();
        }),
        ("add a file beside it", |path| {
            fs::write(path.with_extension("added"), "edited").unwrap();
        }),
        ("set an extended attribute", |path| {
            rustix::fs::setxattr(path, "user.edited", b"1", XattrFlags::empty()).unwrap();
        }),
    ];

    /// What the commit replaces or deletes: files, and files in directories.
    const PATHS: [&str; 5] = ["file", "kept/file", "typed", "gone/below/file", "replaced/old"];

    fn is_in_removed_directory(path: &str) -> bool {
        path.starts_with("gone") || path.starts_with("replaced")
    }

    fn assert_conflict(error: Error, path: &str, when: &str) {
        let Error::Conflict { paths, .. } = error else { panic!("{when}: {error}") };
        let [found] = &paths[..] else { panic!("{when}: {paths:?}") };
        assert_eq!(found.with_extension(""), Path::new(path), "{when}");
    }

    #[test]
    fn an_edit_after_the_plan_was_made_is_a_conflict_and_stays() {
        for path in PATHS {
            for (name, edit) in EDITS {
                if name == "add a file beside it" && !is_in_removed_directory(path) {
                    continue; // no conflict
                }
                let when = format!("{name} {path}");
                let (scenario, disk, commit, _) = decided(Store::Inside);
                edit(&scenario.base().join(path));
                let edited = scenario.snapshot();
                let error = commit.apply(&disk).expect_err(&when);
                assert_conflict(error, path, &when);
                assert_eq!(without_times(&scenario.snapshot()), without_times(&edited), "{when}");
            }
        }
    }

    #[test]
    fn an_edit_between_the_comparison_and_the_rename_is_a_conflict_and_stays() {
        for path in PATHS {
            for (name, edit) in EDITS {
                let is_inside = is_in_removed_directory(path);
                if (name == "add a file beside it" || name == "set an extended attribute")
                    && !is_inside
                {
                    continue; // documented: not noticed in this moment
                }
                let when = format!("{name} {path}");
                let (scenario, disk, commit, _) = decided(Store::Inside);
                let mut watch = Watch::new(&disk, &commit.displaced);
                let mut edited = None;
                for step in &commit.steps {
                    watch.before(step).unwrap();
                    let takes =
                        |taken: &(&Path, &Location, Statx)| Path::new(path).starts_with(taken.0);
                    if edited.is_none() && watch.taken.last().is_some_and(takes) {
                        edit(&scenario.base().join(path));
                        edited = Some(fs::read(scenario.base().join(path)).unwrap());
                    }
                    step.run(&disk, Direction::Forward).unwrap();
                }
                assert_conflict(watch.after_all().expect_err(&when), path, &when);
                commit.rollback(&disk, commit.steps.len()).unwrap();
                let found = fs::read(scenario.base().join(path)).unwrap();
                assert_eq!(Some(found), edited, "{when}");
            }
        }
    }

    #[test]
    fn a_write_through_a_descriptor_that_stays_open_until_the_last_step_is_a_conflict() {
        let (scenario, disk, commit, _) = decided(Store::Inside);
        let path = scenario.base().join("file");
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        let mut watch = Watch::new(&disk, &commit.displaced);
        for step in &commit.steps {
            watch.before(step).unwrap();
            step.run(&disk, Direction::Forward).unwrap();
        }
        watch.after_all().unwrap();
        file.write_all(b" edited").unwrap();
        assert_conflict(watch.after_all().unwrap_err(), "file", "a late write");
        commit.rollback(&disk, commit.steps.len()).unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "old file edited");
    }

    #[test]
    fn attributes_that_others_set_after_the_plan_was_made_are_a_conflict_and_stay() {
        let (scenario, disk, commit, _) = decided(Store::Inside);
        let kept = scenario.base().join("kept");
        fs::set_permissions(&kept, fs::Permissions::from_mode(0o711)).unwrap();
        let edited = scenario.snapshot();
        assert_conflict(commit.apply(&disk).unwrap_err(), "kept", "chmod of a directory");
        assert_eq!(
            fs::metadata(&kept).unwrap().permissions().mode() & 0o777,
            0o711,
            "the rollback leaves what others set"
        );
        assert_eq!(scenario.snapshot(), edited);
    }
}
