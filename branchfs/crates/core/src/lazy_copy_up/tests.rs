#![expect(clippy::cast_possible_truncation, reason = "test code: small files")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use super::*;
use crate::layer::BASE;

/// An original of random content with holes, its partial copy, and what the copy must show.
struct Rig {
    directory: tempfile::TempDir,
    copy: PartialCopy,
    wanted: Vec<u8>,
    random: u64,
}

const SIZE: usize = 300_001;

impl Rig {
    fn new(seed: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let original = File::create(directory.path().join("original")).unwrap();
        let mut wanted = vec![0; SIZE];
        let mut random = seed;
        for start in (0..SIZE).step_by(20_000) {
            let end = (start + 12_000).min(SIZE);
            wanted[start..end].fill_with(|| u8::try_from(next(&mut random) % 255).unwrap() + 1);
            original.write_all_at(&wanted[start..end], start as u64).unwrap();
        }
        original.set_len(SIZE as u64).unwrap();
        let copy = File::create(directory.path().join("copy")).unwrap();
        copy.set_len(SIZE as u64).unwrap();
        let seen = LowerFingerprint::of(original.as_fd()).unwrap();
        let path = PathBuf::from("original");
        let record =
            Record { has_map: true, limit: seen.size, layer: BASE, path, fingerprint: seen };
        record.write(copy.as_fd(), Namespace::Trusted).unwrap();
        File::create(directory.path().join("map")).unwrap();
        let copy = reopen(directory.path());
        Self { directory, copy, wanted, random }
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(next(&mut self.random)).unwrap_or(usize::MAX) % limit
    }

    /// Any place, often near the edge of a block.
    fn offset(&mut self) -> usize {
        let limit = self.wanted.len() + 9000;
        let anywhere = self.below(limit);
        if self.below(2) == 0 { anywhere } else { anywhere - anywhere % 4096 + self.below(3) }
    }

    fn extend(&mut self, length: usize) {
        let length = length.max(self.wanted.len());
        self.wanted.resize(length, 0);
    }

    fn step(&mut self) -> String {
        let (offset, length) = (self.offset(), 1 + self.below(20_000));
        let (at, count) = (offset as u64, length as u64);
        match self.below(8) {
            0..=2 => {
                let data = vec![u8::try_from(self.below(256)).unwrap(); length];
                assert_eq!(self.copy.write(&data, at).unwrap(), length);
                self.extend(offset + length);
                self.wanted[offset..offset + length].copy_from_slice(&data);
                format!("write {length} at {offset}")
            }
            3 => {
                let length = self.below(SIZE * 2);
                self.copy.resize(length as u64).unwrap();
                self.wanted.resize(length, 0);
                format!("resize {length}")
            }
            4 => {
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                self.copy.allocate(mode, at, count).unwrap();
                let (start, end) =
                    (offset.min(self.wanted.len()), (offset + length).min(self.wanted.len()));
                self.wanted[start..end].fill(0);
                format!("punch {length} at {offset}")
            }
            5 => {
                self.copy.allocate(FallocateFlags::ZERO_RANGE, at, count).unwrap();
                self.extend(offset + length);
                self.wanted[offset..offset + length].fill(0);
                format!("zero {length} at {offset}")
            }
            6 => {
                self.copy.allocate(FallocateFlags::empty(), at, count).unwrap();
                self.extend(offset + length);
                format!("allocate {length} at {offset}")
            }
            _ => {
                // What a crash leaves: everything in memory is lost, the file is not.
                self.copy = reopen(self.directory.path());
                "reopen".to_owned()
            }
        }
    }

    fn check(&self, when: &str) {
        let mut found = vec![0xee; self.wanted.len() + 10];
        let length = self.copy.read(&mut found, 0).unwrap();
        assert_eq!(length, self.wanted.len(), "{when}");
        let differs = (0..length).find(|at| found[*at] != self.wanted[*at]);
        assert_eq!(differs, None, "{when}: first difference");
    }

    /// What SEEK_DATA and SEEK_HOLE call a hole reads as zeros, and they come to an end.
    fn check_holes(&self, when: &str) {
        let mut at = 0;
        while (at as usize) < self.wanted.len() {
            let data = match self.copy.seek_data(at) {
                Err(Errno::NXIO) => self.wanted.len() as u64,
                other => other.unwrap(),
            };
            assert!(
                self.wanted[at as usize..data as usize].iter().all(|byte| *byte == 0),
                "{when}: no hole in {at}..{data}"
            );
            if data as usize == self.wanted.len() {
                return;
            }
            at = self.copy.seek_hole(data).unwrap();
            assert!(at > data, "{when}");
        }
    }
}

fn reopen(directory: &Path) -> PartialCopy {
    let open = |name: &str| {
        OpenOptions::new().read(true).write(true).open(directory.join(name)).unwrap().into()
    };
    let (file, original): (OwnedFd, OwnedFd) = (open("copy"), open("original"));
    let seen = LowerFingerprint::of(original.as_fd()).unwrap();
    let original = LowerFile::new(original, seen, None).unwrap();
    let whole =
        Record { has_map: true, limit: 0, layer: BASE, path: PathBuf::new(), fingerprint: seen };
    let record = Record::read(file.as_fd(), Namespace::Trusted).unwrap().unwrap_or(whole);
    PartialCopy::new(file, open("map"), &record, original, Namespace::Trusted).unwrap()
}

fn complete(copy: &PartialCopy) -> Result<()> {
    copy.bring()?;
    copy.finish()
}

fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random >> 1
}

#[test]
fn random_work_shows_what_a_whole_copy_would_show() {
    for seed in 1..=12 {
        let mut rig = Rig::new(seed);
        rig.check("at first");
        for step in 0..40 {
            let done = rig.step();
            let when = format!("seed {seed}, step {step}: {done}");
            rig.check(&when);
            rig.check_holes(&when);
        }
        complete(&rig.copy).unwrap();
        rig.check(&format!("seed {seed}, complete"));
        assert!(Record::read(rig.copy.file.as_fd(), Namespace::Trusted).unwrap().is_none());
        let file = File::open(rig.directory.path().join("copy")).unwrap();
        let mut whole = vec![0; rig.wanted.len()];
        file.read_exact_at(&mut whole, 0).unwrap();
        assert!(whole == rig.wanted, "seed {seed}: the file alone has everything");
    }
}

#[test]
fn a_copy_of_a_partial_copy_shows_the_same() {
    for seed in 100..=108 {
        let mut rig = Rig::new(seed);
        for _ in 0..10 {
            rig.step();
        }
        if rig.wanted.is_empty() {
            continue;
        }
        // A second copy on top of the first.
        let file: OwnedFd = File::open(rig.directory.path().join("copy")).unwrap().into();
        let seen = LowerFingerprint::of(file.as_fd()).unwrap();
        let below = Arc::new(reopen(rig.directory.path()));
        let original = LowerFile::new(file, seen, Some(below)).unwrap();
        let second = tempfile::tempfile().unwrap();
        second.set_len(seen.size).unwrap();
        let path = PathBuf::new();
        let record =
            Record { has_map: true, limit: seen.size, layer: BASE, path, fingerprint: seen };
        record.write(second.as_fd(), Namespace::Trusted).unwrap();
        let (second, map) = (second.into(), tempfile::tempfile().unwrap().into());
        rig.copy = PartialCopy::new(second, map, &record, original, Namespace::Trusted).unwrap();
        rig.check(&format!("seed {seed}"));
        rig.check_holes(&format!("seed {seed}"));
        rig.copy.write(b"second", 5000).unwrap();
        rig.extend(5006);
        rig.wanted[5000..5006].copy_from_slice(b"second");
        rig.check(&format!("seed {seed}, written"));
        let whole: OwnedFd = tempfile::tempfile().unwrap().into();
        rig.copy.copy_to(&whole).unwrap();
        let mut found = vec![0; rig.wanted.len()];
        File::from(whole).read_exact_at(&mut found, 0).unwrap();
        assert!(found == rig.wanted, "seed {seed}: copied out");
        complete(&rig.copy).unwrap();
        rig.check(&format!("seed {seed}, complete"));
    }
}

#[test]
fn one_byte_takes_one_block_and_completing_keeps_holes_and_times() {
    use std::os::unix::fs::MetadataExt;
    let rig = Rig::new(7);
    let path = rig.directory.path().join("copy");
    let blocks = || std::fs::metadata(&path).unwrap().blocks();
    let before = blocks();
    rig.copy.write(b"x", 150_000).unwrap();
    assert!(blocks() - before <= 8, "{} of 512 bytes", blocks() - before);
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    complete(&rig.copy).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), modified);
    let original = std::fs::metadata(rig.directory.path().join("original")).unwrap().blocks();
    assert!(blocks() <= original + 16, "{} for {original}", blocks());
}

#[test]
fn an_original_that_was_changed_is_never_mixed_in() {
    let rig = Rig::new(9);
    rig.copy.write(&[7; 4096], 0).unwrap();
    let original =
        OpenOptions::new().write(true).open(rig.directory.path().join("original")).unwrap();
    original.write_all_at(b"theirs", 100_000).unwrap();
    original.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let mut buffer = [0; 4096];
    assert_eq!(rig.copy.read(&mut buffer, 0), Ok(4096), "what is here can be read");
    assert_eq!(buffer, [7; 4096]);
    assert_eq!(rig.copy.read(&mut buffer, 100_000), Err(Errno::IO));
    assert_eq!(rig.copy.write(b"x", 100_001), Err(Errno::IO), "a block in part");
    assert_eq!(complete(&rig.copy), Err(Errno::IO));
    rig.copy.resize(0).unwrap();
    rig.copy.write(b"new", 0).unwrap();
    assert_eq!(complete(&rig.copy), Ok(()));
}

#[test]
fn file_systems_that_keep_holes_are_told_from_those_that_do_not() {
    let directory = tempfile::tempdir().unwrap();
    assert!(is_possible_in(directory.path()), "ext4, and every file system the tests run on");
    assert!(!is_possible_in(Path::new("/proc")));
}

/// What a failed write in a large folio leaves: blocks that were reserved stay as zeros, and `SEEK_DATA` calls them data.
#[test]
fn leftovers_of_a_failed_write_are_never_shown() {
    for seed in 200..=206 {
        let mut rig = Rig::new(seed);
        let file = OpenOptions::new().write(true).open(rig.directory.path().join("copy")).unwrap();
        for step in 0..30 {
            let missing = {
                let state = rig.copy.reading();
                state.missing(0, state.limit)
            };
            if let Some((start, end)) = missing.get(rig.below(missing.len().max(1))) {
                let at = start + rig.below((end - start) as usize) as u64;
                let length = (1 + rig.below(30_000) as u64).min(end - at) as usize;
                let junk = if step % 2 == 0 { 0 } else { 0xaa };
                file.write_all_at(&vec![junk; length], at).unwrap();
            }
            rig.check(&format!("seed {seed}, step {step}: leftovers"));
            let done = rig.step();
            rig.check(&format!("seed {seed}, step {step}: {done}"));
        }
        complete(&rig.copy).unwrap();
        rig.check(&format!("seed {seed}, complete"));
    }
}

#[test]
fn after_a_loss_of_power_a_map_without_content_shows_the_original() {
    let mut rig = Rig::new(11);
    let before = rig.wanted[8192..16384].to_vec();
    rig.copy.write(&[7; 8192], 8192).unwrap();
    rig.copy.write(&[9; 8192], 32768).unwrap();
    rig.wanted[32768..40960].fill(9);
    // The map reached the disk, and the content of the first write did not.
    punch(&rig.copy.file, 8192, 16384).unwrap();
    rig.copy = reopen(rig.directory.path());
    rig.wanted[8192..16384].copy_from_slice(&before);
    rig.check("reopened");
}

#[test]
fn copies_of_earlier_versions_are_read_and_get_a_map_when_they_are_written() {
    let mut rig = Rig::new(13);
    rig.copy.write(b"earlier", 50_000).unwrap();
    rig.wanted[50_000..50_007].copy_from_slice(b"earlier");
    let mut record = Record::read(rig.copy.file.as_fd(), Namespace::Trusted).unwrap().unwrap();
    record.has_map = false;
    record.write(rig.copy.file.as_fd(), Namespace::Trusted).unwrap();
    File::create(rig.directory.path().join("map")).unwrap();
    rig.copy = reopen(rig.directory.path());
    rig.check("without a map");
    let read = || Record::read(rig.copy.file.as_fd(), Namespace::Trusted).unwrap().unwrap();
    assert!(!read().has_map, "reading changes nothing");
    rig.copy.write(b"later", 150_000).unwrap();
    assert!(read().has_map);
    rig.wanted[150_000..150_005].copy_from_slice(b"later");
    rig.copy = reopen(rig.directory.path());
    rig.check("with a map");
}

#[test]
fn a_file_shows_the_blocks_that_a_whole_copy_would_have() {
    use std::os::unix::fs::MetadataExt;
    let rig = Rig::new(15);
    let blocks = |name: &str| {
        let path = rig.directory.path().join(name);
        File::open(&path).unwrap().sync_all().unwrap(); // a file system counts otherwise what it has yet to allocate
        std::fs::metadata(&path).unwrap().blocks()
    };
    let original = blocks("original");
    assert_eq!(rig.copy.blocks().unwrap(), original + blocks("copy"), "nothing written yet");
    rig.copy.write(&[1; 5000], 0).unwrap();
    rig.copy.write(&[1; 4096], 12288).unwrap(); // a hole of the original
    rustix::fs::fsync(&rig.copy.file).unwrap();
    let now = rig.copy.blocks().unwrap();
    assert!((original + 8..original + 24).contains(&now), "{now} after {original}");
    rig.copy.resize(40_960).unwrap();
    rustix::fs::fsync(&rig.copy.file).unwrap();
    let shown = rig.copy.blocks().unwrap();
    complete(&rig.copy).unwrap();
    let whole = blocks("copy");
    assert!(shown.abs_diff(whole) < 7, "{shown} shown, {whole} once it is whole");
}
