//! Files that are mapped into memory: when a mapping keeps a branch from being committed or forked, and that it does so no
//! longer once it is released, whatever is released last, the mapping or the descriptor.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

pub(crate) mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::mapping::{Mapping, PAGE_BYTES, Sharing};
use common::{Mount, driver, refusal};

const ORDERS: [&str; 2] = ["the mapping is released last", "the descriptor is closed last"];

/// Options of `mount` under which the kernel and the daemon write what is mapped.
fn options() -> &'static [&'static [&'static str]] {
    if driver() == "overlay" { &[&[]] } else { &[&[], &["--no-passthrough"]] }
}

fn fill(base: &Path) {
    fs::write(base.join("small"), [b'o'; 2 * PAGE_BYTES]).unwrap();
    fs::write(base.join("big"), vec![b'o'; 1 << 20]).unwrap();
}

/// Files of this size are big here.
const BIG: u64 = 512 << 10;

fn mounted(options: &[&str]) -> Mount {
    let mount = Mount::unmounted(fill).with_big_files_from(BIG);
    mount.mount_with(options);
    mount
}

fn mounted_over(options: &[&str], from: &Path) -> Mount {
    let copy = |base: &Path| {
        for name in ["small", "big"] {
            fs::copy(from.join(name), base.join(name)).unwrap();
        }
    };
    let mount = Mount::unmounted(copy).with_big_files_from(BIG);
    mount.mount_with(options);
    mount
}

fn open_for_writing(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

#[test]
fn a_released_mapping_blocks_no_commit() {
    for options in options() {
        let mount = mounted(options);
        for round in 0..20_u8 {
            for name in ["small", "big"] {
                for order in ORDERS {
                    for sharing in [Sharing::Writable, Sharing::Private] {
                        let branch = mount.create("branch");
                        let file = open_for_writing(&branch.join(name));
                        let mapping = Mapping::new(&file, 2 * PAGE_BYTES, sharing);
                        mapping.write(PAGE_BYTES, &[round]).unwrap();
                        fs::write(branch.join("other"), [round]).unwrap();
                        if order == ORDERS[0] {
                            drop(file);
                            drop(mapping);
                        } else {
                            drop(mapping);
                            drop(file);
                        }
                        let done = mount.run(&["commit", "branch"], &[]);
                        let said = String::from_utf8_lossy(&done.stderr);
                        assert!(
                            done.status.success(),
                            "{options:?}, {name}, {sharing:?}, {order}, round {round}: {said}"
                        );
                        let found = fs::read(mount.base().join(name)).unwrap()[PAGE_BYTES];
                        if sharing == Sharing::Writable {
                            assert_eq!(found, round, "{options:?}, {name}, {order}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_writable_mapping_whose_descriptor_is_closed_counts_as_open_for_writing() {
    for options in options() {
        let mount = mounted(options);
        let branch = mount.create("branch");
        let mapping =
            Mapping::new(&open_for_writing(&branch.join("small")), PAGE_BYTES, Sharing::Writable);
        mapping.write(0, b"mapped").unwrap();
        let refused = refusal(&mount.run(&["commit", "branch"], &[]));
        assert!(refused.contains("open for writing"), "{options:?}: {refused}");
        mapping.write(0, b"again!").unwrap();
        drop(mapping);
        mount.commit("branch");
        assert_eq!(&fs::read(mount.base().join("small")).unwrap()[..6], b"again!", "{options:?}");
    }
}

/// A file that was written and closed may still be read by others, who opened it meanwhile.
#[test]
fn readers_of_a_file_that_was_open_for_writing_before_block_no_verb() {
    for options in options() {
        for (verb, is_mapped) in
            ["commit", "rebase", "fork"].into_iter().flat_map(|verb| [(verb, false), (verb, true)])
        {
            let mount = mounted(options);
            let branch = mount.create("branch");
            let mut readers = Vec::new();
            for name in ["small", "big", "new"] {
                let path = branch.join(name);
                let open =
                    File::options().read(true).write(true).create(true).truncate(false).open(&path);
                let file = open.unwrap();
                file.write_all_at(b"new", 0).unwrap();
                let mapping = is_mapped.then(|| Mapping::new(&file, 3, Sharing::Writable));
                readers.push(File::open(&path).unwrap());
                drop(file);
                drop(mapping);
            }
            let words: &[&str] = match verb {
                "fork" => &["create", "--parent", "branch", "child"],
                verb => &[verb, "branch"],
            };
            let done = mount.run(words, &[]);
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success(), "{options:?}, {verb}, mapped: {is_mapped}: {said}");
        }
    }
}

#[test]
fn a_writable_mapping_is_noticed_beside_readers() {
    for options in options() {
        let mount = mounted(options);
        let path = mount.create("branch").join("small");
        let file = open_for_writing(&path);
        let mapping = Mapping::new(&file, PAGE_BYTES, Sharing::Writable);
        let _reader = File::open(&path).unwrap();
        drop(file);
        mapping.write(0, b"mapped").unwrap();
        let commit: &[&str] = &["commit", "branch"];
        // A fork stops what the daemon writes.
        let fork: &[&str] = &["create", "--parent", "branch", "child"];
        for words in if options.is_empty() { vec![commit, fork] } else { vec![commit] } {
            let refused = refusal(&mount.run(words, &[]));
            assert!(refused.contains("open for writing"), "{options:?}: {refused}");
        }
        drop(mapping);
        mount.commit("branch");
        assert_eq!(&fs::read(mount.base().join("small")).unwrap()[..6], b"mapped", "{options:?}");
    }
}

#[test]
fn mappings_that_only_read_the_file_block_no_commit_or_fork() {
    for options in options() {
        let mount = mounted(options);
        let branch = mount.create("branch");
        let mut mappings = Vec::new();
        for name in ["small", "big"] {
            for sharing in [Sharing::ReadOnly, Sharing::Private] {
                let file = File::open(branch.join(name)).unwrap();
                let mapping = Mapping::new(&file, 2 * PAGE_BYTES, sharing);
                if sharing == Sharing::Private {
                    mapping.write(0, b"private").unwrap();
                }
                mappings.push(mapping);
            }
        }
        let child = mount.create_below("branch", "child");
        fs::write(child.join("small"), [b'n'; 2 * PAGE_BYTES]).unwrap();
        fs::write(child.join("big"), vec![b'n'; 1 << 20]).unwrap();
        mount.commit("child");
        for mapping in &mappings {
            let found = mapping.read();
            assert!(found[PAGE_BYTES..].iter().all(|byte| *byte == b'o'), "{options:?}");
        }
        mount.commit("branch");
        for name in ["small", "big"] {
            let content = fs::read(mount.base().join(name)).unwrap();
            assert!(content.iter().all(|byte| *byte == b'n'), "{options:?}, {name}");
        }
    }
}

#[test]
fn a_write_through_a_mapping_is_read_by_a_later_open() {
    for options in options() {
        let mount = mounted(options);
        let branch = mount.create("branch");
        for name in ["small", "big"] {
            let path = branch.join(name);
            let file = open_for_writing(&path);
            let mapping = Mapping::new(&file, 2 * PAGE_BYTES, Sharing::Writable);
            drop(file);
            // A file that is read before is in the kernel's cache, if that is filled.
            for at in 0..5 {
                mapping.write(at, b"m").unwrap();
                let found = fs::read(&path).unwrap()[..=at].to_vec();
                assert_eq!(found, b"m".repeat(at + 1), "{options:?}, {name}");
            }
            drop(mapping);
            assert_eq!(&fs::read(&path).unwrap()[..6], b"mmmmmo", "{options:?}, {name}");
        }
        mount.commit("branch");
        assert_eq!(&fs::read(mount.base().join("small")).unwrap()[..6], b"mmmmmo", "{options:?}");
    }
}

/// What a private mapping shows of three pages when its file is truncated by its path, and grows again: page by page, the
/// first byte, or nothing where the page cannot be had. The first page was written in the mapping.
fn pages_after_truncation(path: &Path, is_writable: bool) -> Vec<Vec<Option<u8>>> {
    let file = if is_writable { open_for_writing(path) } else { File::open(path).unwrap() };
    let mapping = Mapping::new(&file, 3 * PAGE_BYTES, Sharing::Private);
    mapping.write(0, b"p").unwrap();
    mapping.read();
    let set = |length: usize| {
        open_for_writing(path).set_len(length as u64).unwrap();
        (0..3).map(|page| mapping.byte(page * PAGE_BYTES).ok()).collect()
    };
    [PAGE_BYTES + 1, 2 * PAGE_BYTES, 3 * PAGE_BYTES, 0, PAGE_BYTES].map(set).to_vec()
}

/// Either the same as in an ordinary directory, or the old content, which a reader from before the first change keeps.
#[test]
fn a_private_mapping_of_a_truncated_file_shows_nothing_that_was_never_there() {
    let kept = vec![vec![Some(b'p'), Some(b'o'), Some(b'o')]; 5];
    for is_writable in [false, true] {
        let ordinary = tempfile::tempdir().unwrap();
        fs::write(ordinary.path().join("small"), [b'o'; 3 * PAGE_BYTES]).unwrap();
        fs::write(ordinary.path().join("big"), vec![b'o'; 1 << 20]).unwrap();
        for options in options() {
            let mount = mounted_over(options, ordinary.path());
            let branch = mount.create("branch");
            for is_changed_before in [false, true] {
                for name in ["small", "big"] {
                    let path = branch.join(name);
                    fs::copy(ordinary.path().join(name), ordinary.path().join("copy")).unwrap();
                    let native = pages_after_truncation(&ordinary.path().join("copy"), is_writable);
                    if is_changed_before {
                        fs::copy(ordinary.path().join(name), &path).unwrap();
                    }
                    let found = pages_after_truncation(&path, is_writable);
                    let when = format!(
                        "{options:?}, {name}, writable: {is_writable}, changed before: {is_changed_before}"
                    );
                    println!("{when}: kept {}", found == kept);
                    let may_keep = !is_writable && !is_changed_before;
                    assert!(
                        found == native || (may_keep && found == kept),
                        "{when}:\n{found:?}\n{native:?}"
                    );
                }
            }
        }
    }
}
