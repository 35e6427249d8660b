//! Big files are copied up in part: the cost, and that the content is the same as after a full copy-up.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use common::disk::Disk;
use common::{Mount, refusal, shell, succeed};

/// Big enough to be copied in part.
const SIZE: usize = 17 << 20;

/// Every block has another byte than its neighbours.
fn pattern() -> Vec<u8> {
    let block = |number: usize| vec![u8::try_from(number % 251).unwrap() + 1; 4096];
    (0..SIZE / 4096).map(block).collect::<Vec<_>>().concat()
}

fn mount() -> Mount {
    Mount::over(|base| {
        fs::write(base.join("big"), pattern()).unwrap();
    })
}

fn write_at(path: &Path, data: &[u8], offset: usize) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(data, offset as u64).unwrap();
}

/// What the file's layer has on disk, in bytes.
fn stored(mount: &Mount, name: &str) -> u64 {
    let store = mount.base().join(".branching/layers");
    fs::read_dir(store)
        .unwrap()
        .map(|layer| layer.unwrap().path().join("upper").join(name))
        .filter_map(|path| fs::metadata(path).ok())
        .map(|status| status.blocks() * 512)
        .sum()
}

fn assert_content(path: &Path, wanted: &[u8], when: &str) {
    let found = fs::read(path).unwrap();
    assert_eq!(found.len(), wanted.len(), "{when}");
    if found != wanted {
        let at = (0..found.len()).find(|at| found[*at] != wanted[*at]);
        panic!("{when}: differs from byte {at:?} on");
    }
}

#[test]
fn one_byte_in_the_middle_of_a_gibibyte_takes_a_block() {
    let mount = Mount::over(|base| {
        let big = File::create(base.join("big")).unwrap();
        big.set_len(1 << 30).unwrap();
        big.write_all_at(&[b'.'; 8192], (1 << 29) - 4096).unwrap();
    });
    let branch = mount.create("branch");
    write_at(&branch.join("big"), b"x", 1 << 29);
    assert!(stored(&mount, "big") <= 16 << 10, "{} bytes", stored(&mount, "big"));
    let mut around = [0; 8192];
    let file = File::open(branch.join("big")).unwrap();
    file.read_exact_at(&mut around, (1 << 29) - 4096).unwrap();
    let mut wanted = [b'.'; 8192];
    wanted[4096] = b'x';
    assert!(around == wanted);
    assert_eq!(file.metadata().unwrap().len(), 1 << 30);
    drop(file);
    mount.commit("branch");
    let committed = fs::metadata(mount.base().join("big")).unwrap();
    assert!(committed.blocks() * 512 < 1 << 20, "its holes are kept");
    assert_eq!(committed.len(), 1 << 30);
}

#[test]
fn attributes_change_without_a_copy() {
    let mount = mount();
    let branch = mount.create("branch");
    let ino = fs::metadata(branch.join("big")).unwrap().ino();
    shell(&branch, "chmod 600 big; touch -d 2001-02-03 big; mv big other");
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::lsetxattr(branch.join("other"), "user.mark", b"x", flags).unwrap();
    assert!(stored(&mount, "other") <= 8 << 10, "at most its extended attributes");
    assert_eq!(fs::metadata(branch.join("other")).unwrap().ino(), ino);
    assert_eq!(attributes(&branch.join("other")), b"user.mark\0");
    assert_content(&branch.join("other"), &pattern(), "renamed in the branch");
    mount.commit("branch");
    assert_content(&mount.base().join("other"), &pattern(), "committed");
    let status = fs::metadata(mount.base().join("other")).unwrap();
    assert_eq!((status.mode() & 0o777, status.mtime()), (0o600, 981_158_400));
    assert_eq!(attributes(&mount.base().join("other")), b"user.mark\0");
}

/// Names of a file's extended attributes.
fn attributes(path: &Path) -> Vec<u8> {
    let mut list = vec![0; 4096];
    let length = rustix::fs::llistxattr(path, list.as_mut_slice()).unwrap();
    list.truncate(length);
    list
}

#[test]
fn every_way_of_changing_it_shows_what_a_whole_copy_would_show() {
    let mount = mount();
    let branch = mount.create("branch");
    let (path, mut wanted) = (branch.join("big"), pattern());
    write_at(&path, b"unaligned", 5_000_000);
    wanted[5_000_000..5_000_009].copy_from_slice(b"unaligned");
    assert_content(&path, &wanted, "written");
    shell(&branch, "fallocate -p -o 1000000 -l 500000 big");
    wanted[1_000_000..1_500_000].fill(0);
    assert_content(&path, &wanted, "a hole punched");
    shell(&branch, "fallocate -z -o 3000000 -l 10000 big; fallocate -o 8000000 -l 9999 big");
    wanted[3_000_000..3_010_000].fill(0);
    assert_content(&path, &wanted, "zeroed and allocated");
    shell(&branch, "truncate -s 15000001 big; truncate -s 18000000 big");
    wanted.truncate(15_000_001);
    wanted.resize(18_000_000, 0);
    assert_content(&path, &wanted, "cut and grown");
    shell(&branch, "printf end >> big");
    wanted.extend_from_slice(b"end");
    assert_content(&path, &wanted, "appended");
    shell(
        &branch,
        "python3 -c \"
import mmap, os
descriptor = os.open('big', os.O_RDWR)
mapping = mmap.mmap(descriptor, 0)
mapping[6000000:6000006] = b'mapped'
mapping.flush()
assert os.copy_file_range(descriptor, descriptor, 4096, 6000000, 9000000) == 4096
other = os.open('copy', os.O_RDWR | os.O_CREAT)
done = 0
while done < len(mapping):
    done += os.copy_file_range(descriptor, other, len(mapping) - done, done, done)
\"",
    );
    wanted[6_000_000..6_000_006].copy_from_slice(b"mapped");
    wanted.copy_within(6_000_000..6_004_096, 9_000_000);
    assert_content(&path, &wanted, "mapped and copied within");
    assert_content(&branch.join("copy"), &wanted, "copied out");
    mount.commit("branch");
    assert_content(&mount.base().join("big"), &wanted, "committed");
    assert_eq!(
        fs::read_dir(mount.base())
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name() != ".branching")
            .count(),
        2
    );
}

#[test]
fn it_survives_a_killed_daemon_at_any_time() {
    let mount = mount();
    let branch = mount.create("branch");
    let (path, mut wanted) = (branch.join("big"), pattern());
    for round in 0..4_usize {
        let offset = 1_000_003 * (round + 1);
        write_at(&path, &[b'r'; 3000], offset);
        wanted[offset..offset + 3000].fill(b'r');
        if round == 2 {
            shell(&branch, "truncate -s 10000000 big; truncate -s 11000000 big");
            wanted.truncate(10_000_000);
            wanted.resize(11_000_000, 0);
        }
        mount.kill();
        mount.mount();
        assert_content(&path, &wanted, &format!("round {round}"));
    }
    assert!(stored(&mount, "big") < 100 << 10, "still in part: {} bytes", stored(&mount, "big"));
    mount.commit("branch");
    assert_content(&mount.base().join("big"), &wanted, "committed");
}

#[test]
fn branches_of_branches_see_through_the_parts_of_all() {
    let mount = mount();
    let parent = mount.create("parent");
    let mut wanted = pattern();
    write_at(&parent.join("big"), b"parent", 2_000_000);
    wanted[2_000_000..2_000_006].copy_from_slice(b"parent");
    let frozen = wanted.clone();
    let child = mount.create_below("parent", "child");
    assert_content(&child.join("big"), &wanted, "unchanged in the child");
    write_at(&child.join("big"), b"child", 2_000_003);
    wanted[2_000_003..2_000_008].copy_from_slice(b"child");
    assert_content(&child.join("big"), &wanted, "changed in the child");
    assert_content(&parent.join("big"), &frozen, "not in the parent");
    assert!(stored(&mount, "big") < 100 << 10, "{} bytes", stored(&mount, "big"));
    mount.kill();
    mount.mount();
    assert_content(&child.join("big"), &wanted, "after a restart");
    mount.commit("child");
    assert_content(&parent.join("big"), &wanted, "committed into the parent");
    write_at(&parent.join("big"), b"again", 12_000_000);
    wanted[12_000_000..12_000_005].copy_from_slice(b"again");
    mount.commit("parent");
    assert_content(&mount.base().join("big"), &wanted, "committed into the base");
}

#[test]
fn readers_and_writers_at_a_time_lose_nothing() {
    let mount = mount();
    let branch = mount.create("branch");
    let path = branch.join("big");
    let first = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    std::thread::scope(|scope| {
        // Neighbours write the same blocks.
        for writer in 0..4_usize {
            let file = if writer % 2 == 0 {
                first.try_clone().unwrap()
            } else {
                OpenOptions::new().write(true).open(&path).unwrap()
            };
            scope.spawn(move || {
                for step in 0..200 {
                    let offset = (step * 4 + writer) * 1000;
                    file.write_all_at(&[b'0' + u8::try_from(writer).unwrap(); 1000], offset as u64)
                        .unwrap();
                }
            });
        }
        let reader = File::open(&path).unwrap();
        scope.spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            let wanted = pattern();
            for step in 0..100 {
                let offset = (1 << 20) + step * 128 * 1024;
                reader.read_exact_at(&mut buffer, offset as u64).unwrap();
                assert!(buffer == wanted[offset..][..buffer.len()]);
            }
        });
    });
    let mut wanted = pattern();
    for piece in 0..800_usize {
        wanted[piece * 1000..][..1000].fill(b'0' + u8::try_from(piece % 4).unwrap());
    }
    assert_content(&path, &wanted, "all writes are there");
}

#[test]
fn an_original_that_others_change_is_refused_and_never_mixed_in() {
    let mount = mount();
    let branch = mount.create("branch");
    write_at(&branch.join("big"), b"mine", 1_000_000);
    write_at(&mount.base().join("big"), b"theirs", 9_000_000);
    let failed = fs::read(branch.join("big")).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::EIO));
    assert!(refusal(&mount.run(&["commit", "branch"], &[])).contains("big"));
    let mut kept = [0; 4];
    let file = File::open(branch.join("big")).unwrap();
    // Its own blocks, without those that reading ahead would want.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    file.read_exact_at(&mut kept, 1_000_000).unwrap();
    assert_eq!(&kept, b"mine");
    fs::write(branch.join("big"), "all mine").unwrap();
    assert_eq!(fs::read_to_string(branch.join("big")).unwrap(), "all mine");
    let mut base = [0; 6];
    File::open(mount.base().join("big")).unwrap().read_exact_at(&mut base, 9_000_000).unwrap();
    assert_eq!(&base, b"theirs");
}

#[test]
fn it_works_where_set_id_bits_links_and_small_files_meet_it() {
    let mount = Mount::over(|base| {
        fs::write(base.join("big"), pattern()).unwrap();
        fs::set_permissions(base.join("big"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::write(base.join("linked"), pattern()).unwrap();
        fs::hard_link(base.join("linked"), base.join("link")).unwrap();
    });
    let branch = mount.create("branch");
    let mut wanted = pattern();
    wanted[..3].copy_from_slice(b"new");
    for name in ["big", "linked"] {
        write_at(&branch.join(name), b"new", 0);
        assert_content(&branch.join(name), &wanted, name);
    }
    assert_content(&branch.join("link"), &wanted, "the other name");
    shell(&branch, "ln big hard; test $(stat -c %h big) = 2; rm big; ln hard big; rm hard");
    assert_content(&branch.join("big"), &wanted, "linked and unlinked");
    mount.commit("branch");
    for name in ["big", "linked", "link"] {
        assert_content(&mount.base().join(name), &wanted, name);
    }
}

#[test]
fn a_diff_reads_through_to_what_is_not_copied() {
    let mount = mount();
    let branch = mount.create("branch");
    write_at(&branch.join("big"), b"changed", 3_000_000);
    shell(&branch, "cp big copy; chmod 640 big; mv big moved");
    let shown = mount.run(&["diff", "branch", "--stat"], &[]);
    common::succeed(&shown);
    let copies = mount.directory.path().join("copies");
    fs::create_dir(&copies).unwrap();
    fs::write(copies.join("big"), pattern()).unwrap();
    let patch = mount.run(&["diff", "--patch", "branch"], &[]);
    common::succeed(&patch);
    let file = mount.directory.path().join("patch");
    fs::write(&file, patch.stdout).unwrap();
    shell(&copies, &format!("git apply --binary {}", file.display()));
    let mut wanted = pattern();
    wanted[3_000_000..3_000_007].copy_from_slice(b"changed");
    assert_content(&copies.join("moved"), &wanted, "the renamed file of the patch");
    assert_content(&copies.join("copy"), &wanted, "the copy");
    let layer = mount.directory.path().join("layer.tar");
    common::succeed(&mount.run(&["export", "branch", "--output", layer.to_str().unwrap()], &[]));
    shell(&copies, &format!("mkdir layer; tar xf {} -C layer", layer.display()));
    assert_content(&copies.join("layer/moved"), &wanted, "the exported file");
    assert!(stored(&mount, "moved") < 100 << 10, "looking at it copies nothing");
}

/// Size of the files on small file systems, where they count as big.
const SMALL: usize = 3 << 20;

/// Small file systems that cannot share blocks, with a file `big` in the base.
fn small_disks() -> Vec<(&'static str, Disk)> {
    let images = [
        ("ext4 with blocks of 1 KiB", "24M", "mkfs.ext4 -q -m 0 -b 1024"),
        ("ext4 with blocks of 4 KiB", "24M", "mkfs.ext4 -q -m 0 -b 4096"),
        ("XFS without reflinks", "300M", "mkfs.xfs -q -m reflink=0"),
    ];
    let images = images.map(|(name, size, make)| (name, Disk::image(size, make)));
    let memory = ("tmpfs", Disk::mounted("mount -t tmpfs -o size=24M none base"));
    let disks = images.into_iter().chain([memory]);
    disks
        .map(|(name, disk)| {
            let disk = disk.with_big_files_from(1 << 20);
            fs::write(disk.base().join("big"), &pattern()[..SMALL]).unwrap();
            disk.mount();
            (name, disk)
        })
        .collect()
}

/// Writes all to the disk, and drops the cached pages of the file `big` in the base, in the layers and in the branch.
fn drop_caches(disk: &Disk) {
    shell(
        disk.directory.path(),
        "sync -f base
         find base/.branching/layers base/big mount/@branch/big -type f -exec dd if={} of=/dev/null iflag=nocache count=0 status=none ';'",
    );
}

/// Runs the test on each of the small disks, all at the same time.
fn on_small_disks(test: impl Fn(&str, Disk) + Sync) {
    std::thread::scope(|scope| {
        for (name, disk) in small_disks() {
            let test = &test;
            scope.spawn(move || test(name, disk));
        }
    });
}

/// Rooms that end in the middle of large folios, and in the middle of blocks.
const ROOMS: [u64; 4] = [0, 37_000, 400_000, 1_300_001];

#[test]
fn a_commit_that_finds_no_room_changes_nothing_and_takes_no_room() {
    on_small_disks(|name, disk| {
        let branch = disk.create("branch");
        let mut wanted = pattern()[..SMALL].to_vec();
        write_at(&branch.join("big"), b"patch", 1 << 20);
        wanted[1 << 20..][..5].copy_from_slice(b"patch");
        for room in ROOMS {
            let when = format!("{name}, {room} bytes left");
            let filler = disk.fill(room);
            let free = disk.free();
            refusal(&disk.run(&["commit", "branch"], &[]));
            assert!(disk.free() + (64 << 10) > free, "{when}: {} of {free} left", disk.free());
            fs::remove_file(filler).unwrap();
            drop_caches(&disk);
            assert_content(&branch.join("big"), &wanted, &when);
            disk.unmount();
            disk.mount();
            assert_content(&branch.join("big"), &wanted, &format!("{when}, mounted again"));
        }
        disk.commit("branch");
        assert_content(&disk.base().join("big"), &wanted, &format!("{name}, committed"));
    });
}

#[test]
fn a_write_that_finds_no_room_leaves_all_else_as_it_was() {
    on_small_disks(|name, disk| {
        let branch = disk.create("branch");
        let path = branch.join("big");
        let mut wanted = pattern()[..SMALL].to_vec();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        for (round, room) in ROOMS.into_iter().enumerate() {
            let when = format!("{name}, {room} bytes left");
            let filler = disk.fill(room);
            let (start, byte) = (300_000 * round + 1234, b'a' + u8::try_from(round).unwrap());
            let data = vec![byte; 1_500_000];
            let mut done = 0;
            while let Ok(written) = file.write_at(&data[done..], (start + done) as u64) {
                done += written;
                if done == data.len() {
                    break;
                }
            }
            assert!(done < data.len(), "{when}: there was room for all");
            wanted[start..start + done].fill(byte);
            assert_content(&path, &wanted, &when);
            fs::remove_file(filler).unwrap();
            if round == 1 {
                file.write_all_at(b"over what a failure left", 900_001).unwrap();
                wanted[900_001..900_025].copy_from_slice(b"over what a failure left");
            }
            drop_caches(&disk);
            assert_content(&path, &wanted, &format!("{when}, from the disk"));
        }
        drop(file);
        disk.kill();
        disk.mount();
        assert_content(&path, &wanted, &format!("{name}, mounted again"));
        disk.commit("branch");
        assert_content(&disk.base().join("big"), &wanted, &format!("{name}, committed"));
    });
}

#[test]
fn tar_and_du_find_the_blocks_of_a_file_that_was_not_copied() {
    let mount = mount();
    let branch = mount.create("branch");
    let native = fs::metadata(mount.base().join("big")).unwrap().blocks();
    let archive = |directory: &Path, when: &str| {
        shell(directory, "tar -cSf archive.tar big; mkdir out; tar -xf archive.tar -C out");
        assert_content(&directory.join("out/big"), &pattern(), when);
        shell(directory, "rm -r out archive.tar");
    };
    let near = |path: &Path, when: &str| {
        let blocks = fs::metadata(path).unwrap().blocks();
        assert!(blocks.abs_diff(native) <= 32, "{when}: {blocks} blocks, not {native}");
    };
    for change in ["chmod 600 big", "touch big", "mv big b; mv b big", "ln big l; rm l"] {
        shell(&branch, change);
        near(&branch.join("big"), change);
        archive(&branch, change);
    }
    let first = pattern()[..1].to_vec();
    write_at(&branch.join("big"), &first, 0);
    near(&branch.join("big"), "a byte written");
    archive(&branch, "a byte written");
    // By a listing, of a nested branch, and through an open descriptor of a removed file.
    let child = mount.create_below("branch", "child");
    shell(&child, "chmod 640 big");
    let child_blocks =
        "test $(ls -ls big | cut -d' ' -f1) -gt 17000; test $(du -k big | cut -f1) -gt 17000";
    shell(&child, child_blocks);
    archive(&child, "in a nested branch");
    shell(&child, "exec 3<big; rm big; test $(stat -L -c %b /dev/fd/3) -gt 34000");
    mount.abort("child");
    shell(&branch, child_blocks);
    let plus = mount.create("another");
    shell(&plus, "chmod 600 big");
    mount.unmount();
    mount.mount();
    shell(&plus, child_blocks);
    near(&plus.join("big"), "listed after a remount");
}

#[test]
fn parts_that_cannot_be_read_are_no_holes() {
    let mount = mount();
    let branch = mount.create("branch");
    write_at(&branch.join("big"), b"mine", 1_000_000);
    write_at(&mount.base().join("big"), b"theirs", 9_000_000);
    mount.unmount();
    mount.mount();
    assert!(fs::metadata(branch.join("big")).unwrap().blocks() * 512 >= SIZE as u64);
    let copied = std::process::Command::new("tar")
        .args(["-cSf", "archive.tar", "big"])
        .current_dir(&branch)
        .output();
    assert!(!copied.unwrap().status.success(), "tar must fail, not archive zeros");
    let copied = std::process::Command::new("cp")
        .args(["--sparse=auto", "big", "copy"])
        .current_dir(&branch)
        .output();
    assert!(!copied.unwrap().status.success(), "cp must fail, not copy zeros");
}

/// Ways in which a sibling removes the big file of the base from its path, or changes it.
const TAKEN_AWAY: [&str; 5] =
    ["rm big", "mv big e", "mkdir d; mv big d/big", "printf x >>big", "rm big; mkdir big"];

/// A branch with an own block in `big`, and what the file must show.
fn late(mount: &Mount, path: &str) -> Vec<u8> {
    let branch = mount.create("late");
    write_at(&branch.join("big"), b"mine", 1_000_000);
    if path != "big" {
        fs::rename(branch.join("big"), branch.join(path)).unwrap();
    }
    let mut wanted = pattern();
    wanted[1_000_000..1_000_004].copy_from_slice(b"mine");
    wanted
}

fn assert_rebased(mount: &Mount, path: &str, wanted: &[u8], when: &str) {
    for options in [&[][..], &["--force"]] {
        let done = mount.run(&[&["rebase"], options, &["late"]].concat(), &[]);
        if options.is_empty() {
            assert!(refusal(&done).contains("--force"), "{when}");
        } else {
            succeed(&done);
        }
    }
    assert_content(&mount.branch("late").join(path), wanted, &format!("{when}: rebased"));
    mount.unmount();
    mount.mount();
    assert_content(&mount.branch("late").join(path), wanted, &format!("{when}: remounted"));
    mount.commit("late");
    assert_content(&mount.base().join(path), wanted, &format!("{when}: committed"));
}

#[test]
fn a_rebased_branch_keeps_the_content_that_others_took_out_of_its_parent() {
    for policy in ["first-winner", "snapshot"] {
        for (taken_away, path) in TAKEN_AWAY.iter().flat_map(|one| [(one, "big"), (one, "other")]) {
            let when = format!("{policy} | {taken_away} | {path}");
            let mount = mount();
            let wanted = late(&mount, path);
            shell(&mount.create("winner"), taken_away);
            succeed(&mount.run(&["commit", "--policy", policy, "winner"], &[]));
            mount.unmount();
            mount.mount();
            // The file goes on to other places.
            let second = "test ! -f e || mv e f; test ! -f d/big || rm -r d; echo 2 >second";
            shell(&mount.create("second"), second);
            succeed(&mount.run(&["commit", "--policy", policy, "second"], &[]));
            assert_rebased(&mount, path, &wanted, &when);
        }
    }
}

#[test]
fn a_stale_branch_keeps_its_content_when_the_history_drops_the_commit_that_has_it() {
    for drop in ["prune", "limit", "undone"] {
        let options: &[&str] = if drop == "limit" { &["--history", "1"] } else { &[] };
        let mount = Mount::with(options, |base| fs::write(base.join("big"), pattern()).unwrap());
        let first = |name: &str, work: &str| {
            shell(&mount.create(name), work);
            mount.commit(name);
        };
        let mut wanted = pattern();
        if drop == "undone" {
            // The undo takes away what the branch has seen.
            first("first", "printf first | dd of=big conv=notrunc bs=1 seek=5 status=none");
            wanted[5..10].copy_from_slice(b"first");
        }
        late(&mount, "big");
        wanted[1_000_000..1_000_004].copy_from_slice(b"mine");
        match drop {
            "prune" => {
                first("winner", "rm big");
                succeed(&mount.run(&["prune", "--keep", "0"], &[]));
            }
            "limit" => {
                first("winner", "rm big");
                first("next", "echo 2 >second");
            }
            _ => {
                succeed(&mount.run(&["undo", "--force"], &[]));
                first("next", "echo 2 >second");
            }
        }
        let history = mount.ask("history")["entries"].clone();
        assert!(!history.to_string().contains("winner"), "{drop}: {history}");
        assert!(!history.to_string().contains("first"), "{drop}: {history}");
        assert_rebased(&mount, "big", &wanted, drop);
    }
}

#[test]
fn a_rebase_is_refused_when_the_content_of_a_file_is_gone() {
    let mount = mount();
    late(&mount, "big");
    fs::write(mount.branch("late").join("small"), "kept").unwrap();
    shell(&mount.create("winner"), "echo 1 >first");
    mount.commit("winner");
    let aside = mount.directory.path().join("aside");
    fs::rename(mount.base().join("big"), &aside).unwrap();
    let said = refusal(&mount.run(&["rebase", "--force", "late"], &[]));
    assert!(said.contains("only parts"), "{said}");
    assert!(said.lines().any(|line| line.trim() == "big"), "{said}");
    assert_eq!(mount.ask("list")["branches"][0]["state"], "stale");
    // Two ways out: the original comes back, or the branch goes on without the file.
    let back = || fs::rename(&aside, mount.base().join("big")).unwrap();
    back();
    let mut wanted = pattern();
    wanted[1_000_000..1_000_004].copy_from_slice(b"mine");
    succeed(&mount.run(&["rebase", "--force", "late"], &[])); // it has another ctime
    assert_content(&mount.branch("late").join("big"), &wanted, "put back");
    shell(&mount.create("next"), "echo 2 >second");
    mount.commit("next");
    fs::remove_file(mount.base().join("big")).unwrap();
    let said = refusal(&mount.run(&["commit", "--rebase", "--skip", "late"], &[]));
    assert!(said.contains("big"), "{said}");
    assert!(!mount.base().join("small").exists());
    fs::remove_file(mount.branch("late").join("big")).unwrap();
    mount.commit("late");
    assert_eq!(fs::read_to_string(mount.base().join("small")).unwrap(), "kept");
}

#[test]
fn a_prune_without_room_for_the_content_of_a_stale_branch_is_refused_and_loses_nothing() {
    let disk = Disk::image("44M", "mkfs.ext4 -q -m 0");
    fs::write(disk.base().join("big"), pattern()).unwrap();
    disk.mount();
    let wanted = late(&disk, "big");
    shell(&disk.create("winner"), "rm big");
    disk.commit("winner");
    let filler = disk.fill(0);
    for verb in [&["prune", "--keep", "0"][..], &["rebase", "--force", "late"]] {
        let said = refusal(&disk.run(verb, &[]));
        assert!(said.contains("big: No space left on device"), "{said}");
        assert_eq!(disk.ask("history")["entries"].as_array().unwrap().len(), 1);
        assert_eq!(disk.ask("list")["branches"][0]["state"], "stale");
    }
    fs::remove_file(filler).unwrap();
    succeed(&disk.run(&["prune", "--keep", "0"], &[]));
    assert_rebased(&disk, "big", &wanted, "with room");
}
