//! Where objects lie after some steps, and where they came from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::step::{Location, Step};

/// The moves planned so far: present locations by later ones.
#[derive(Debug, Default)]
pub(crate) struct PathMap {
    /// Later location of a moved tree -> its present location; `None` if nothing will be there.
    at: BTreeMap<Location, Option<Location>>,
}

impl PathMap {
    /// The moves that would reverse these steps, the last one first.
    pub(crate) fn reversing<'a>(steps: impl Iterator<Item = &'a Step>) -> Self {
        let mut moves = Self::default();
        steps.for_each(|step| moves.add_reversed(step));
        moves
    }

    pub(super) fn add(&mut self, step: &Step) {
        match step {
            Step::Rename { from, to, .. } => {
                let origin = self.origin(from);
                let below = self.take_below(from);
                self.at.insert(from.clone(), None);
                self.at.insert(to.clone(), origin);
                self.put_below(to, below);
            }
            Step::Exchange { one, other, .. } => {
                let origins = (self.origin(one), self.origin(other));
                let below = (self.take_below(one), self.take_below(other));
                self.at.insert(one.clone(), origins.1);
                self.at.insert(other.clone(), origins.0);
                self.put_below(one, below.1);
                self.put_below(other, below.0);
            }
            Step::RemoveXattr { .. } | Step::Metadata { .. } => {}
        }
    }

    /// Adds the step that reverses `step`.
    pub(super) fn add_reversed(&mut self, step: &Step) {
        match step {
            Step::Rename { from, to, ino, directory } => self.add(&Step::Rename {
                from: to.clone(),
                to: from.clone(),
                ino: *ino,
                directory: *directory,
            }),
            other => self.add(other),
        }
    }

    /// The entries whose later location is in the base, by their path.
    pub(super) fn base_entries(self) -> BTreeMap<PathBuf, Option<Location>> {
        let base = |(place, origin)| match place {
            Location::Base(path) => Some((path, origin)),
            Location::Store(_) => None,
        };
        self.at.into_iter().filter_map(base).collect()
    }

    /// Objects that move within the base: present path and later one.
    pub(super) fn within_base(&self) -> impl Iterator<Item = (&Path, &Path)> {
        self.at.iter().filter_map(|(to, from)| match (from, to) {
            (Some(Location::Base(from)), Location::Base(to)) if from != to => {
                Some((from.as_path(), to.as_path()))
            }
            _ => None,
        })
    }

    /// Whether the undo moves an object to or from a location, or below it.
    pub(super) fn touches(&self, place: &Location) -> bool {
        self.at
            .range(place.clone()..)
            .next()
            .is_some_and(|(key, _)| path_below(key, place).is_some())
    }

    /// Removes and returns the entries strictly below a location, relative to it. Paths sort by components, so they are
    /// adjacent.
    fn take_below(&mut self, place: &Location) -> Vec<(PathBuf, Option<Location>)> {
        let below: Vec<Location> = self
            .at
            .range(place.clone()..)
            .map(|(key, _)| key)
            .take_while(|key| path_below(key, place).is_some())
            .filter(|key| *key != place)
            .cloned()
            .collect();
        below
            .into_iter()
            .filter_map(|key| {
                let origin = self.at.remove(&key)?;
                let rest = key.path().strip_prefix(place.path()).ok()?.to_path_buf();
                Some((rest, origin))
            })
            .collect()
    }

    fn put_below(&mut self, place: &Location, entries: Vec<(PathBuf, Option<Location>)>) {
        for (rest, origin) in entries {
            self.at.insert(with_rest(place, &rest), origin);
        }
    }

    /// The present location of the object that will be at `place`.
    pub(crate) fn origin(&self, place: &Location) -> Option<Location> {
        for root in place.path().ancestors() {
            let key = match place {
                Location::Base(_) => Location::Base(root.to_path_buf()),
                Location::Store(_) => Location::Store(root.to_path_buf()),
            };
            if let Some(origin) = self.at.get(&key) {
                let rest = place.path().strip_prefix(root).ok()?;
                return origin.as_ref().map(|origin| with_rest(origin, rest));
            }
        }
        Some(place.clone())
    }
}

pub(super) fn with_rest(place: &Location, rest: &Path) -> Location {
    if rest.as_os_str().is_empty() { place.clone() } else { place.join(rest.as_os_str()) }
}

fn path_below<'p>(place: &'p Location, root: &Location) -> Option<&'p Path> {
    match (place, root) {
        (Location::Base(path), Location::Base(root))
        | (Location::Store(path), Location::Store(root)) => path.strip_prefix(root).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(path: &str) -> Location {
        Location::Base(PathBuf::from(path))
    }

    fn rename(from: &str, to: &str) -> Step {
        Step::Rename { from: base(from), to: base(to), ino: 0, directory: true }
    }

    #[test]
    fn a_path_in_a_moved_directory_leads_to_its_present_place() {
        let mut moves = PathMap::default();
        moves.add(&rename("file", "directory/file"));
        moves.add(&rename("directory", "moved"));
        assert_eq!(moves.origin(&base("moved/file")), Some(base("file")));
        assert_eq!(moves.origin(&base("moved/other")), Some(base("directory/other")));
        assert_eq!(moves.origin(&base("directory/other")), None);
        assert_eq!(moves.origin(&base("file")), None);
        moves.add(&Step::Exchange {
            one: base("moved"),
            other: base("other"),
            ino_one: 0,
            ino_other: 0,
            directory: true,
        });
        assert_eq!(moves.origin(&base("other/file")), Some(base("file")));
        assert_eq!(moves.origin(&base("moved/x")), Some(base("other/x")));
    }
}
