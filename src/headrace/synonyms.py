"""Words of other libraries and of older guides, and what to write instead.

The keys say what to write, the values list the words, separated by spaces. Nothing here is an
alias. `docs/moving.md` has the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping

_PATHS = "root path paths data_dir folder directory file files filename input_dir url"
_LABELS = "labels label target y label_column label_key label_field"
_BUFFERS = "shuffle_buffer shuffle_buffer_size shuffle_size shuffle_window initial_fill"
BY_ARGUMENT = {
    # datasets; each key begins with the argument that it is about
    "data_path": f"{_PATHS} urls",
    "urls": f"{_PATHS} shards data_path",
    "data_path, the path of that part of the data, such as 'photos/train'": "train split",
    "urls, those of that part of the data": "train split",
    "source, a Source of the records; for a path use open_dataset(path)": "data_path path",
    "image_size": "size resize img_size resolution input_size",
    "size": "image_size resize img_size resolution",
    "max_size": "size max_resolution",
    "patch_shape": "patch_size tile_size roi_size window_size chunk_size array_shape",
    "stride": "overlap step_size",
    "max_length": "seq_len seq_length sequence_length max_seq_len max_seq_length context_length",
    "max_length, with packing=True": "block_size",
    "window": "seq_len sequence_length window_size horizon num_steps",
    "unit='line'": "lines by_line line_by_line",
    "dataset_name": "key keys name dataset array variable h5_key data_key",
    "columns": "features fields feature_columns usecols cols variables keys",
    "targets": f"{_LABELS} annotations",
    "target_name": f"{_LABELS} target_column target_key",
    "target_field": f"{_LABELS} target_column target_key",
    "text_field": "text_column text_key content_field",
    "column": "text_column image_column image_key image_field",
    "transform": "augment augmentation augmentations train_transform pipeline preprocess map_fn",
    "target_transform": "label_transform",
    "normalize": "normalise normalization",
    "color": "grayscale greyscale color_mode",
    "tokenizer": "tokenize tokenize_fn",
    "loading_mode": "mode",
    "loading_mode='cached'": "cache cached use_cache keep_in_memory os_cache memory_efficient",
    "loading_mode='eager'": "eager in_memory preload load_in_memory",
    "loading_mode='lazy'": "lazy",
    "loading_mode='streaming'": "streaming stream",
    "cache_size": "cache_limit max_cache_size",
    "disk_cache_size": "cache_limit max_cache_size",
    "max_memory_usage": "required_memory memory_limit max_memory max_ram",
    "on_error='skip'": "skip_bad skip_errors ignore_errors handler on_bad_files",
    "progress": "verbose progress_bar show_progress",
    # loaders
    "batch_size": "bs batch per_device_train_batch_size",
    "shuffle and drop_last, or DataLoaderConfig.train() and .eval()": "is_train is_training train",
    "num_workers": "workers n_workers num_threads num_proc dataloader_num_workers py_num_workers",
    "prefetch_factor": (
        "prefetch prefetch_batches batches_ahead predownload max_pre_download prefetch_queue_depth"
    ),
    "persistent_workers": "persistent",
    "multiprocessing_context": "mp_context start_method context",
    "drop_last": "drop_remainder drop_last_batch drop_incomplete",
    "collate_fn": "collate collator data_collator collate_function",
    "collate_fn, a callable or the name of a registered one": "task_spec modality collator_name",
    "buffer_size": _BUFFERS,
    "shuffle='block'": _BUFFERS,
    "sampler": "custom_sampler",
    "batch_sampler": "custom_batch_sampler",
    "weights": (
        "weighted_sampler sample_weights class_weights dataloader_weights probabilities proportions"
    ),
    "balanced": "balance class_balanced",
    "bucket_by_length": "group_by_length length_bucketing bucketing",
    "num_samples, steps x batch_size x ranks": "iterations_per_epoch epoch_size samples_per_epoch",
    "seed": "generator_seed random_seed random_state shuffle_seed data_seed",
    "seed, or generator": "rng",
    "rank and world_size, which are detected": "distributed ddp use_distributed_sampler",
    "rank": "global_rank shard_id",
    "world_size": "num_replicas num_shards num_ranks",
    "device": "pin_memory_device to_device use_gpu cuda gpu",
    "device: from pinned memory batches are copied while a step runs": "non_blocking",
    # several loaders, modules
    "loaders": "dataloaders datasets",
    "loaders, a dict whose keys are the names": "dataloader_names names",
    "strategy": "sampling_strategy stopping_strategy",
    "train": "train_data train_dataset train_path",
    "val": "val_data val_dataset val_path valid validation eval_dataset",
    "val_split": "validation_split val_fraction val_size test_size",
    # functions
    "fraction": "train_size train_fraction ratio split_ratio lengths fractions",
    "fraction, which is the share of the first part": "test_size val_size val_fraction",
    "k": "n_splits n_folds num_folds",
    "loader": "dataloader train_dataloader val_dataloader",
    "seconds, the time that measuring may take": "num_batches warmup num_warmup",
    "accumulate": "accumulate_grad_batches accumulation_steps gradient_accumulation_steps",
    "length": "num_batches steps_per_epoch",
    "nbytes": "required_memory memory size",
    "pad_value": "pad_token_id padding_value pad_id",
    "max_bytes": "maxsize size max_size",
    "dst": "output output_dir output_path destination out",
    "workers": "num_workers num_proc n_workers",
    "path": "data_path root folder file filename",
    "name": "dataset_name key",
}
BY_REMEDY = {
    "a loop: for epoch in range(epochs)": "epochs num_epochs n_epochs max_epochs",
    "dataset.subset(indices), or dataset.split(fraction)": "subset fraction limit max_samples",
    "train, val = dataset.split(fraction, groups=..., stratify=...)": "groups stratify",
}
BY_NAME = {
    # datasets
    "ImageDataset(path)": "ImageFolder DatasetFolder ImageFolderDataset",
    "TextDataset(path)": "TextFolder LineByLineTextDataset JsonlDataset TextFileDataset",
    "TableDataset(path)": "ParquetDataset ArrowDataset NumpyDataset CSVDataset TabularDataset",
    "StreamingDataset(urls)": "WebDataset WebLoader TarDataset ShardedDataset",
    "HDF5Dataset(path)": "H5Dataset Hdf5Dataset HDF5DataSet",
    "ZarrDataset(path, patch_shape=...)": "CellMapDataset PatchDataset VolumeDataset",
    "open_dataset(path)": "load_dataset load_from_disk create_dataset get_dataset",
    "FilesDataset(path, extensions, decode)": "AudioDataset VideoDataset FileDataset",
    "BaseDataset, with a Source and a decode of your own": "Dataset IterableDataset",
    "dataset.subset(indices)": "Subset",
    "dataset.split(fraction)": "random_split train_test_split",
    "torch.utils.data.ConcatDataset, which create_dataloader takes": "ConcatDataset",
    "transform= of a dataset, or collate_fn=VisionCollator()": "BatchTransform",
    # loaders
    "create_dataloader(dataset)": (
        "DataLoader CellMapDataLoader EfficientDataLoader create_optimized_dataloader "
        "StreamingDataLoader create_loader get_dataloader"
    ),
    "create_dataloader(dataset), whose loader has state_dict()": "StatefulDataLoader",
    "create_dataloader(path or dataset), for all formats and uses": "DataLoaderFactory",
    "create_dataloader(TextDataset(path))": "create_text_dataloader",
    "create_dataloader(ImageDataset(path))": "create_image_dataloader create_vision_dataloader",
    "create_dataloader, or headrace.order.OrderSampler": "DistributedSampler",
    "weights= of create_dataloader": "WeightedRandomSampler",
    "MultiDataLoader({name: dataset})": (
        "create_multi_dataloader create_multi_dataloaders CombinedLoader CombinedStreamingDataset "
        "interleave_datasets RandomMix"
    ),
    "the arguments of MultiDataLoader(loaders, ...)": "MultiDataLoaderConfig",
    "a string: MultiDataLoader(loaders, 'weighted')": "SamplingStrategy",
    "DataModule(train, val)": "UniversalDataModule LightningDataModule",
    # collating
    "collators.get(name), @collators.register(name)": "CollatorRegistry register_collator",
    "collators.get(name)": "get_collator",
    "collate_fn=, any callable from a list of samples to a batch": "CustomCollateFn collate_fn",
    "collate_fn=, a callable or the name of a registered one": "TaskSpec",
    "collate_fn='default', the default": "DefaultCollator default_collate",
    "VisionCollator()": "VisionDataCollator ImageCollator",
    "TextCollator(tokenizer)": "LanguageModelingDataCollator DataCollatorForLanguageModeling",
    "pad_collate()": "DataCollatorWithPadding PadCollator PaddingCollator SequenceCollator",
    # seeds
    "seed= of create_dataloader, which seeds each sample": "seed_worker worker_init_fn",
    "seed_everything(seed, deterministic=True)": (
        "set_reproducible_training ensure_deterministic_dataloader"
    ),
    "seed_everything(seed)": "set_seed seed_all manual_seed",
    # measuring and packing
    "loader.get_stats(), or headrace.monitor.LoadingMonitor()": "DataLoaderPerformanceMonitor",
    "profile_dataloader(loader)": "diagnose_dataloader_speed benchmark_dataloader",
    "find_max_batch_size(step)": "calculate_optimal_batch_size",
    "num_workers=None, or suggest_num_workers(dataset), which measures": "get_optimal_num_workers",
    "pack(dataset, 'train.h5')": (
        "convert_to_h5 MDSWriter ShardWriter TarWriter DatasetWriter optimize"
    ),
}
LOADER_OPTIONS = frozenset({
    "batch_size", "shuffle", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers",
    "drop_last", "pad", "collate_fn", "sampler", "batch_sampler", "weights", "replacement",
    "balanced", "bucket_by_length", "num_samples", "seed", "interleave", "turns", "rank",
    "world_size", "device", "memory_format", "max_memory_usage", "multiprocessing_context",
    "worker_init_fn", "generator", "timeout", "enable_monitoring", "log_loading_stats",
})  # fmt: skip
"""Names of the options of a loader, which the datasets below know by name only."""


def _by_word(table: Mapping[str, str]) -> dict[str, list[str]]:
    by_word: dict[str, list[str]] = {}
    for remedy, words in table.items():
        for word in words.split():
            by_word.setdefault(word, []).append(remedy)
    return by_word


ARGUMENTS = _by_word(BY_ARGUMENT)
"""What to write for an argument of that name; each remedy begins with an argument that not every
function has.
"""
WITHOUT_ARGUMENT = {word: remedies[0] for word, remedies in _by_word(BY_REMEDY).items()}
"""What to write for an argument that no argument stands for."""
NAMES = {word: remedies[0] for word, remedies in _by_word(BY_NAME).items()}
"""What to use for a name of the package."""
